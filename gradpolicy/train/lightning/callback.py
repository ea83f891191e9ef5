"""The Lightning callback: drives a run under policies."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from gradpolicy.train.lightning.trainer_parts import (
    DEEPSPEED,
    STEP_METHODS,
    AnyCallback,
    check_weight_averaging,
)
from gradpolicy.train.step_in_backward import refused
from gradpolicy.train.training_run import Driven, check_evaluates

# Entry points of the LightningModule itself, whose forward Lightning replaces temporarily.
STEP_POINTS = {"": STEP_METHODS}


class GradientPolicies(Driven, AnyCallback):
    """Installs gradient policies for a Lightning run and removes them afterwards.

    The callback does the following:

    - at the start of a stage: flow policies are installed on the model; for training, optimizers that hold
      parameters of a freeze policy are wrapped in :class:`~gradpolicy.MaskedOptimizer`;
    - before the first batch after an update: schedules are evaluated and new masks are set, so that the
      backward pass can skip frozen parameters; with several processes, DDP's reducer is rebuilt if the set of
      frozen parameters has changed, and at some steps the ranks check that they agree;
    - in the backward pass: gradients of frozen entries are zeroed, so that they count neither in the clipped
      norm nor in logs; in updates that are measured, or whose gradients a mask source needs, this is done
      before the gradients are clipped;
    - under DeepSpeed only the share of active entries is logged of freeze policies;
    - once for each trainable tensor that gets no gradient, or only zeros, for 100 updates, or until it
      freezes or training ends: a warning;
    - schedule-free optimizers are switched to their other weights for validation and at the end;
    - at the end of a stage: everything is removed from the model.

    A checkpoint has the state of the policies in that of the optimizer.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        log: Log values of each policy, such as the share of active entries and gradient norms, as
            ``policy/<name>/…`` at the trainer's ``log_every_n_steps``.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update.
        step_in_backward: Update each parameter in the backward pass as soon as its gradient is complete, and
            free the gradient. Of freeze policies only the active shares are logged then.
        master_weights: Update all bfloat16 and float16 parameters as float32, with 16 more bits for each
            active entry.

    Attributes:
        run: The run, which has its optimizers, the freezer of a fit and the flow policies on the model.
        sinks: Functions that receive the measurements of every ``log_every_n_steps``-th update: the updates
            so far, and the quantities of each policy.

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

    # ---- installing and removing

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before training, that no callback averages frozen weights."""
        if stage == "fit":
            check_weight_averaging(trainer.callbacks, self.policies)  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install all policies, now that the model is on its device and wrapped, and the optimizers exist."""
        strategy, run = trainer.strategy, self.run
        expected = "a validation_step, batches to validate, and limit_val_batches above 0"
        check_evaluates(self.policies, trainer.enable_validation, expected)
        run.idle = strategy.broadcast(run.idle)  # only the first rank has a plan
        if run.in_backward and trainer.accumulate_grad_batches != 1:
            raise refused(f"accumulate_grad_batches={trainer.accumulate_grad_batches}", "1")
        if run.in_backward and (clips := trainer.gradient_clip_val):
            raise refused(f"gradient_clip_val={clips}", "None, and gp.Clip to bound gradients")
        # The same configuration also runs on one process, which sends nothing.
        strategy.optimizers = run.install(
            pl_module,
            strategy.optimizers,
            wrapped=strategy.model,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            entry_points=STEP_POINTS,
        )
        if self.sinks or (self.log_policies and trainer.loggers):
            every = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
            run.measure(lambda updates: (updates + 1) % every == 0)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove everything from the model."""
        self.run.remove(quiet=stage != "fit")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove everything from the model if the run fails."""
        self.run.remove()

    # ---- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the steps of an earlier fit, now that a checkpoint is loaded."""
        # The trainer counts the steps of all optimizers together.
        self.run.count_from(_batches_that_stepped(trainer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin an update before its first batch."""
        if not pl_module.automatic_optimization:
            self.run.steps.end_if_stepped()
        # Only here, so that checkpoints after a validation have the weights that it saw.
        self.run.steps.switch("train")
        self.run.begin(trainer.current_epoch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Pass the unscaled gradients to sources and measurements, before they are clipped."""
        if not isinstance(trainer.strategy, DEEPSPEED):
            self.run.gradients(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the measurements of an update, and stop if a mask source ends the training."""
        if not self.run.steps.optimizers and trainer.global_step > self.run.updates:
            self.run.end()
        self._stop_if_finished(trainer, trainer.current_epoch)
        numbers = self.run.take_measured()
        if numbers and self.log_policies and trainer.loggers:
            # `LightningModule.log` would repeat them at each step until the epoch ends.
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=_batches_that_stepped(trainer) - 1)
            for known in (trainer.callback_metrics, trainer.logged_metrics):
                known.update({name: torch.tensor(number) for name, number in numbers.items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after an epoch with which the last phase of a mask source ends."""
        self._stop_if_finished(trainer, trainer.current_epoch + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have mask sources write what the end demands, such as the best weights of a phase."""
        self.run.steps.switch("eval")
        self.run.freezer.finish()

    def _stop_if_finished(self, trainer: Trainer, epoch: int) -> None:
        if self.run.freezer.is_finished(self.run.updates, epoch):
            trainer.should_stop = True

    # ---- evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies, or switch them to this phase within a fit."""
        self.run.steps.switch("eval")
        self._evaluate(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies for testing."""
        self._evaluate(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install flow policies for prediction."""
        self._evaluate(trainer, pl_module, "predict")

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *position: int
    ) -> None:
        """Check after the first batch that every operation was called."""
        self.run.notices.operations("test")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the metrics to mask sources, and switch back from validation within a fit."""
        if trainer.state.fn == TrainerFn.FITTING:
            if not trainer.sanity_checking:
                self.run.freezer.report(trainer.callback_metrics)
                self._stop_if_finished(trainer, trainer.current_epoch)
            self.run.evaluate("fit", trainer.current_epoch)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, phase: str) -> None:
        self.run.updates = self.run.updates or _batches_that_stepped(trainer)
        self.run.install_flow(pl_module, STEP_POINTS)
        self.run.evaluate(phase, trainer.current_epoch)


def _batches_that_stepped(trainer: Trainer) -> int:
    """Return the number of updates by which Lightning logs; it counts those of all optimizers together."""
    return trainer.global_step // max(len(trainer.optimizers), 1)
