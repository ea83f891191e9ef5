"""The Lightning callback, which installs, updates, measures, saves and removes policies."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from gradpolicy.policies import Policy
from gradpolicy.train.lightning.trainer_parts import STEP_METHODS, callbacks_of
from gradpolicy.train.lightning.weight_averaging import check_weight_averaging
from gradpolicy.train.measurements import summary
from gradpolicy.train.training_policies import TrainingPolicies

# Entry points of the LightningModule itself, whose forward Lightning replaces temporarily.
STEP_POINTS = {"": STEP_METHODS}


class GradientPolicies(TrainingPolicies, Callback):
    """Installs gradient policies for a Lightning run and removes them afterwards.

    The callback does the following:

    - at the start of a stage: flow policies are installed on the model; for training, optimizers that hold
      parameters of a freeze policy are wrapped in :class:`~gradpolicy.MaskedOptimizer`;
    - before the first batch after an update: schedules are evaluated and new masks are set, so that the
      backward pass can skip frozen parameters; with several processes, DDP's reducer is rebuilt if the set of
      frozen parameters has changed, and at some steps the ranks check that they agree;
    - before gradient clipping, if there is any: gradients of frozen entries are zeroed, so that they count
      neither in the clipped norm nor in logs;
    - as soon as an optimizer has stepped: its update is scaled where a mask source sets learning rates;
    - under DeepSpeed gradients of frozen entries are zeroed as they are computed, and of freeze policies only
      the share of active entries is logged;
    - once for each active tensor that gets no gradient, or only zeros: a warning, see
      :class:`~gradpolicy.freezing.Freezer`;
    - at the end of a stage: everything is removed from the model.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        log: Log values of each policy, such as the share of active entries and gradient norms, as
            ``policy/<name>/…`` at the trainer's ``log_every_n_steps``; a value that stays the same only once;
            those of a test at its end, as ``test/policy/<name>/…``.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update.

    Attributes:
        installed: The flow policies on the model, from the start of a stage to its end.
        freezer: The freezer, which runs the freeze policies of a fit.
        masked_optimizers: The optimizers with parameters of freeze policies.
        sinks: Functions that receive the measurements of every ``log_every_n_steps``-th update and of each
            evaluation: the phase, the updates so far, and the quantities of each policy.

    Raises:
        PolicyError: If an entry is not a policy; when the run starts, if a pattern matches nothing, two
            policies contradict each other, or a policy was not installed; after the first batch, if an
            operation that a policy names was never called.

    Example:
        >>> import gradpolicy as gp
        >>> callback = gp.GradientPolicies({
        ...     "quantizer": gp.StraightThrough(ops=["round"]),
        ...     "trunk": gp.Freeze(gp.masks.Random(density=0.5), params="trunk.*", frozen_state="zero"),
        ... })
        >>> list(callback.policies)
        ['quantizer', 'trunk']
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | None] | None = None,
        *,
        seed: int = 0,
        log: bool = True,
        agreement_every: int | None = 100,
        layers: bool = True,
    ) -> None:
        super().__init__(policies, seed=seed, log=log, agreement_every=agreement_every, layers=layers)
        # True if the update that is being prepared is measured, and the evaluation that is measured.
        self._measures = False
        self._evaluated: str | None = None
        self._restored: dict[str, Any] | None = None

    # ---- installing and removing

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before training, that no callback averages frozen weights."""
        if stage == "fit":
            check_weight_averaging(callbacks_of(trainer, Callback), self.policies)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install all policies, now that the model is on its device and wrapped, and the optimizers exist."""
        self._install_flow(pl_module, STEP_POINTS)
        optimizers: list[Any] = trainer.optimizers
        if self.optimizer_policies:
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                from gradpolicy.integrations.deepspeed import partitioned  # takes seconds

                optimizers = [partitioned(trainer.strategy.model, self.policies)]
                self._install_in_engine(pl_module, *optimizers)
            else:
                optimizers = self._install_freeze(pl_module, trainer.strategy.optimizers)
                trainer.strategy.optimizers = optimizers
        self._check_installed(pl_module, optimizers)
        # The same configuration also runs on one process, which sends nothing.
        self._join_ranks(pl_module, trainer.strategy.model)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies, or switch them to this phase within a fit."""
        self._begin_evaluation(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies for testing."""
        self._begin_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies for prediction."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove everything from the model."""
        self._measure_evaluation(trainer)
        self._remove(quiet=stage != "fit")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove everything from the model if the run fails."""
        self._remove()

    def _remove(self, *, quiet: bool = True) -> None:
        super()._remove(quiet=quiet)
        # Testing a checkpoint also restores its state, with which a new fit must not start.
        self._restored = None
        self._measures, self._evaluated = False, None

    # ---- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply restored state; some strategies restore it only after ``on_fit_start``."""
        restored, self._restored = self._restored, None
        if restored is not None:
            self._apply_restored(restored)
        if self.masked_optimizers and (restored is None or not restored["freezer"]):
            # The trainer counts the steps of all optimizers together.
            self._add_former_steps(trainer.global_step // len(trainer.optimizers))
        if self._is_measured(trainer, "fit"):
            self._start_measuring(None if restored is None else restored.get("measured"))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Update the policies before the first batch of each effective step."""
        updates = self.updates(trainer)
        if self._begin_update(updates, trainer.current_epoch):
            self._measures = self._is_measured(trainer, "fit") and _logs_after_this(trainer)
            if self._measures:
                self._start_measuring().begin()
        if self.installed is not None:
            self.installed.set_loss_scale(_loss_scale(trainer))
            self.installed.measure_norms(self._measures)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check that no policy cuts the loss off from all parameters; torch's own error is less clear.

        Raises:
            PolicyError: If there is such a policy.
        """
        if not loss.requires_grad:
            self._check_cuts()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mask gradients under manual optimization, since the module may clip them before the step.

        Not if a source needs whole gradients: then call the optimizer's ``mask_gradients`` before clipping.
        """
        if not pl_module.automatic_optimization and not self._wanted_gradients():
            for optimizer in self.masked_optimizers:
                with _one_gradient_left(trainer, optimizer):
                    optimizer.mask_gradients()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Pass the unscaled gradients to sources, and mask them if they are clipped or logged."""
        if self._measures or self._wanted_gradients():
            _unscale(trainer, optimizer)
        if self.freezer is None or optimizer not in self.masked_optimizers:
            return
        if self._measures:
            self._start_measuring().take_gradients(optimizer, "gradient_norm_before")
        self.freezer.observe(optimizer)
        if self._measures or self._gradients_are_read(trainer, pl_module):
            with _one_gradient_left(trainer, optimizer):
                optimizer.mask_gradients()
        if self._measures:
            self._start_measuring().take_gradients(optimizer, "gradient_norm_after")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check after the first batch that operations were called; measure the update, if there was one."""
        self._check_operations_met("fit", thaws=any(not p.requires_grad for p in pl_module.parameters()))
        self._stop_if_finished(trainer, trainer.current_epoch)
        updates = self.updates(trainer)
        if self._measures and updates > self._updates_seen:
            self._measures = False
            measured = self._measure("fit", updates)
            if self.log_policies and trainer.loggers:
                self._log(trainer, self._summary(measured))

    def _log(self, trainer: Trainer, numbers: dict[str, float]) -> None:
        """Log the numbers that vary, and give all of them to other callbacks."""
        # `LightningModule.log` would repeat a constant at each step until the epoch ends.
        if varying := self._start_measuring().varying(numbers):
            for logger in trainer.loggers:
                logger.log_metrics(varying, step=_batches_that_stepped(trainer) - 1)
        for known in (trainer.callback_metrics, trainer.logged_metrics):
            known.update({name: torch.tensor(number) for name, number in numbers.items()})

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *position: int
    ) -> None:
        """Check after the first batch that every operation was called."""
        # In a test gradients are recorded only where a callback enables them.
        self._check_operations_met("test", thaws=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch back from validation within a fit."""
        if trainer.state.fn is TrainerFn.FITTING:
            self._measure_evaluation(trainer)
            self._update_flow(trainer, "fit")
            if self.freezer is not None and not trainer.sanity_checking:
                self.freezer.report(trainer.callback_metrics)
                self._stop_if_finished(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after an epoch with which the last phase of a mask source ends."""
        self._stop_if_finished(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have mask sources write what the end demands, such as the best weights of a phase."""
        if self.freezer is not None:
            self.freezer.finish()

    def _stop_if_finished(self, trainer: Trainer, epoch: int) -> None:
        if self.freezer is not None and self.freezer.is_finished(self.updates(trainer), epoch):
            trainer.should_stop = True

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        self._install_flow(pl_module, STEP_POINTS)
        self._update_flow(trainer, phase)
        self._evaluated = phase if self._is_measured(trainer, phase) else None
        if self.installed is not None:
            self.installed.measure_norms(self._evaluated is not None)
        if self._evaluated is not None:
            self._start_measuring().begin(phase)

    def _measure_evaluation(self, trainer: Trainer) -> None:
        """Measure an evaluation after all other callbacks, which may use its policies at its end."""
        phase, self._evaluated = self._evaluated, None
        if phase is None or self.installed is None:
            return
        measured = self._measure(phase, self.updates(trainer))
        if phase == "test" and self.log_policies:
            # Under other keys than in training, since both would otherwise be in one chart.
            numbers = {f"test/{name}": value for name, value in summary(measured).items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def _update_flow(self, trainer: Trainer, phase: str) -> None:
        if self.installed is not None:
            self.installed.update(phase=phase, step=self.updates(trainer), epoch=trainer.current_epoch)

    def updates(self, trainer: Trainer) -> int:
        """Return the number of updates; if no optimizer is masked, the trainer's number."""
        if self.masked_optimizers:
            return max(optimizer.effective_steps for optimizer in self.masked_optimizers)
        return trainer.global_step

    def _gradients_are_read(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Return True if gradients are clipped before the update, or another hook may read them."""
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
        others = [each for each in callbacks_of(trainer, Callback) if each is not self]
        return (
            bool(trainer.gradient_clip_val)
            or any(is_overridden(hook, pl_module) for hook in hooks)
            or any(is_overridden(hooks[0], each, Callback) for each in others)
        )

    def _is_measured(self, trainer: Trainer, phase: str) -> bool:
        """Return True if measurements of a phase are logged or recorded."""
        is_sanity_check = phase == "validate" and trainer.sanity_checking
        logs = self.log_policies and bool(trainer.loggers) and phase in ("fit", "test")
        return not is_sanity_check and (logs or bool(self.sinks))

    # ---- checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state until training starts."""
        self._restored = state_dict

    def _warn(self, line: str) -> None:
        rank_zero_warn(line)


def _loss_scale(trainer: Trainer) -> float:
    """Return the factor on the loss, of the precision plugin's scaler or of DeepSpeed's optimizer."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        return float(scaler.get_scale())
    return float(getattr(trainer.optimizers[0], "loss_scale", 1.0)) if trainer.optimizers else 1.0


def _unscale(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Divide gradients by the loss scale if a fused optimizer would do so in its step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        # It has been done for any other optimizer, and possibly under manual optimization.
        with suppress(RuntimeError):
            scaler.unscale_(optimizer)


@contextmanager
def _one_gradient_left(trainer: Trainer, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set one gradient to zeros, since the loss scaler raises an error for an optimizer without gradients."""
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first = next((parameter for parameter in parameters if parameter.grad is not None), None)
    gradient = None if first is None else first.grad
    yield
    if first is not None and gradient is not None and all(p.grad is None for p in parameters):
        first.grad = gradient.zero_()


def _logs_after_this(trainer: Trainer) -> bool:
    """Return True if Lightning logs after the update that is being prepared."""
    return (_batches_that_stepped(trainer) + 1) % max(trainer.log_every_n_steps, 1) == 0  # type: ignore[attr-defined]


def _batches_that_stepped(trainer: Trainer) -> int:
    """Return the number of updates by which Lightning logs; it counts those of all optimizers together."""
    return trainer.global_step // max(len(trainer.optimizers), 1)
