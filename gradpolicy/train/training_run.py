"""One training under policies: installs them, begins and ends each update, saves their state."""

import io
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError, check_named, shortened
from gradpolicy.flow import install
from gradpolicy.flow.install import Installed
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import as_masked, wrapper_of
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.rates import Rates
from gradpolicy.tensors.checkpoint_file import load_file
from gradpolicy.tensors.packed_mask import pack_masks, unpack_masks
from gradpolicy.train.measurements import Measured, Measurements, summary
from gradpolicy.train.notices import Notices
from gradpolicy.train.ranks import Ranks
from gradpolicy.train.step_in_backward import StepInBackward
from gradpolicy.where import named_parameters, once_each, pick_each

STATE = "gradient_policies"
"""The key of the policies' state in the first param group of a saved optimizer."""


class Run:
    """Trains a model under policies, whichever library drives the loop.

    A driver calls :meth:`install` once the model and its optimizers exist, then :meth:`begin`. From then on
    the next update begins when the last one ends, within the ``step`` of the optimizer; with several
    optimizers once each has stepped, or when one steps again. A step that mixed precision skips is none.
    The state of the policies is in the ``state_dict`` of the first optimizer; loading it begins its update.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update; None: if the output is a terminal.

    Attributes:
        installed: The flow policies on the model.
        freezer: The freezer of the freeze policies.
        optimizers: The optimizers to train with.
        masked_optimizers: Those of them that have masks.
        epoch: The number of completed epochs, which the driver sets.
        steps_per_epoch: The number of updates in an epoch, if the run counts epochs by itself.
        measures: True if the current update is measured.
        measured: The measurements of the last update that was measured, until a driver takes them.
        sinks: Called with each measurement: the phase, the updates so far, and the quantities of each policy.

    Raises:
        PolicyError: If an entry is not a policy.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | None] | None = None,
        *,
        seed: int = 0,
        agreement_every: int | None = 100,
        layers: bool | None = True,
    ) -> None:
        policies = {} if policies is None else policies
        check_named(policies)
        self.policies: dict[str, Policy] = {
            name: policy for name, policy in policies.items() if policy is not None
        }
        for name, policy in self.policies.items():
            if not isinstance(policy, Policy):
                raise PolicyError(f"policy.{name}: must be a gradient policy, got {type(policy).__name__}")
        if agreement_every is not None:
            check_whole("agreement_every", agreement_every, least=1)
        self.seed, self.agreement_every = seed, agreement_every
        self.notices = Notices(self.policies, layers)
        self.sinks: list[Callable[[str, int, Measured], None]] = []
        self.steps_per_epoch: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.installed: Installed | None = None
        self.freezer: Freezer | None = None
        self.optimizers: list[Any] = []
        self.masked_optimizers: list[MaskedOptimizer] = []
        self.epoch = self.updates = 0
        self.measures = False
        self.measured: Measured | None = None
        self._is_measured: Callable[[int], bool] | None = None
        self.measurements: Measurements | None = None
        self.ranks: Ranks | None = None
        self._partitioned: Any = None
        self.hooks: list[Any] = []
        self._hooked: set[Tensor] = set()
        # The steps of each optimizer, and the optimizers that have not stepped in the current update.
        self._steps: dict[Any, int] = {}
        self._waiting: set[Any] = set()
        self._has_begun = False
        # The parameters whose full gradient a source needs in this update.
        self._wanted: set[Tensor] = set()
        # The state of the policies in a state_dict that an optimizer is loading.
        self._loaded: dict[Any, dict[str, Any]] = {}

    # ---- installing and removing

    def install(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        wrapped: nn.Module | None = None,
        entry_points: Mapping[str, Sequence[str]] | None = None,
        toggle_requires_grad: bool = True,
        observes_at_step: bool = True,
        masks_all: bool = False,
    ) -> list[Any]:
        """Install all policies.

        Args:
            model: The model.
            optimizers: The optimizers of its parameters, or the partitioned one of a DeepSpeed engine.
            wrapped: The DistributedDataParallel module, if there is one.
            entry_points: As for ``gradpolicy.flow.install``.
            toggle_requires_grad: As for :class:`~gradpolicy.freezing.Freezer`.
            observes_at_step: Show gradients to mask sources at the start of a step; if False, the driver
                calls :meth:`gradients` before it clips them.
            masks_all: Wrap each optimizer, also without a parameter of a freeze policy, and go on from the
                count of an earlier run.

        Returns:
            The optimizers to train with.
        """
        self._reset()
        self.model, self._masks_all = model, masks_all
        self.install_flow(model, entry_points)
        # A plain optimizer that has loaded a state with masks keeps it in its param groups.
        loaded = [each.state_dict() if STATE in each.param_groups[0] else None for each in optimizers]
        self.optimizers = wrapped_optimizers(model, optimizers, self.policies, masks_all=masks_all)
        self.masked_optimizers += [each for each in self.optimizers if isinstance(each, MaskedOptimizer)]
        self._partitioned = next((each for each in self.optimizers if hasattr(each, "hook_gradients")), None)
        freezes = {name: each for name, each in self.policies.items() if isinstance(each, Freeze)}
        rates = {name: each for name, each in self.policies.items() if isinstance(each, Rates)}
        if freezes or rates:
            with gathered_parameters(self.masked_optimizers):
                self.freezer = Freezer(
                    model,
                    self.masked_optimizers,
                    freezes,
                    rates=rates,
                    seed=self.seed,
                    toggle_requires_grad=toggle_requires_grad,
                )
        self._hook(observes_at_step)
        partitioned = self._partitioned is not None
        self.notices.attach(self.freezer, self.optimizers, partitioned=partitioned)
        named = once_each(named_parameters(model))
        self.ranks = Ranks(
            wrapped, named, self.freezer, self.masked_optimizers, agreement_every=self.agreement_every
        )
        for each, state in zip(self.optimizers, loaded, strict=True):
            if state is not None:
                each.load_state_dict(state)
        return self.optimizers

    def install_flow(self, model: nn.Module, entry_points: Mapping[str, Sequence[str]] | None = None) -> None:
        """Install the flow policies alone, for an evaluation."""
        flow = {name: each for name, each in self.policies.items() if isinstance(each, FlowPolicy)}
        if self.installed is None and flow:
            self.installed = install(model, flow, entry_points=entry_points)
        self.notices.follow(model, self.installed)

    def _hook(self, observes_at_step: bool) -> None:
        self._steps = {each: getattr(each, "effective_steps", 0) for each in self.optimizers}
        self._waiting, self.updates = set(self.optimizers), max(self._steps.values(), default=0)
        notices = self.notices
        # Not a method, which copies of the model would copy with the run.
        self.hooks.append(
            self.model.register_load_state_dict_post_hook(lambda *_: notices.copy_buffers(again=True))
        )
        self.hooks.append(register_optimizer_step_pre_hook(self._refuse_other_step))
        for each in self.optimizers:
            before = partial(self._before_step, observes_at_step)
            self.hooks.append(each.register_step_pre_hook(before))
            self.hooks.append(each.register_step_post_hook(self._after_step))
            self.hooks.append(each.register_load_state_dict_pre_hook(self._before_load))
            self.hooks.append(each.register_load_state_dict_post_hook(self._after_load))
            # Not removed with the others: a state may be saved after the training.
            if (former := _SAVING.pop(each, None)) is not None:
                former.remove()
            _SAVING[each] = each.register_state_dict_post_hook(self._save)
        if self.freezer is not None:
            self._hook_gradients(self.freezer)
            self._reconsidered(self._reconsider)
        if self._partitioned is not None:
            self._partitioned.hook_gradients()

    def remove(self, *, quiet: bool = True) -> None:
        """Remove everything from the model and the optimizers. Masks stay."""
        if self.installed is not None:
            self.installed.remove(quiet=quiet or self.notices.warned_of_operations)
            self.installed = None
        while self.hooks:
            self.hooks.pop().remove()
        if self.freezer is not None:
            self.freezer.restore()
            self._reconsidered(None)
        if self.measurements is not None:
            self.measurements.detach()
            self.measurements = None
        if self.ranks is not None:
            self.ranks.release()
            self.ranks = None
        if self._partitioned is not None:
            self._partitioned.release()
            self._partitioned = None
        self._has_begun = self.measures = False

    # ---- an update

    def begin(self, epoch: int | None = None) -> None:
        """Begin the update, or prepare it once more if the epoch, a metric or a state has changed.

        Args:
            epoch: The number of completed epochs; None: as before, or by ``steps_per_epoch``.
        """
        if epoch is not None or self.steps_per_epoch is not None:
            self.epoch = epoch or self.updates // (self.steps_per_epoch or self.updates + 1)
        if not self._has_begun:
            self._has_begun = True
            self._prepare_measuring()
        if self.installed is not None:
            self.installed.update(phase="fit", step=self.updates, epoch=self.epoch)
        if self.freezer is not None:
            self.freezer.begin_step(self.updates, self.epoch)
            self._hook_gradients(self.freezer)
            self._wanted = {self.freezer.held[name] for name in self.freezer.wanted_gradients()}
        if self.ranks is not None:
            now = (self.updates, self.epoch)
            self.ranks.begin_step(self.updates, cut=any(_cuts(p, *now) for p in self.policies.values()))
        self.notices.what_trains()

    def start_batch(self, loss_scale: float) -> None:
        """Set the loss scale of a batch, which may be one more attempt after an overflow."""
        if self.installed is not None:
            self.installed.set_loss_scale(loss_scale)
            self.installed.measure_norms(self.measures)

    def gradients(self, optimizer: Any) -> None:
        """Show the unscaled gradients of an optimizer to sources, before clipping if the driver can."""
        if self.freezer is None or optimizer not in self.masked_optimizers:
            return
        if self.reads_gradients:
            _unscale(optimizer)
        if self.measures and self.measurements is not None:
            self.measurements.take_gradients(optimizer, "gradient_norm_before")
        self.freezer.observe(optimizer)
        if self.reads_gradients:
            for parameter in optimizer.masked_parameters():
                optimizer.mask_gradient(parameter)
        if self.measures and self.measurements is not None:
            self.measurements.take_gradients(optimizer, "gradient_norm_after")

    def end(self) -> None:
        """End the update, and begin the next one."""
        # An engine steps by itself if no policy needs its optimizer.
        self.updates = max(self._steps.values(), default=self.updates + 1)
        self._waiting = set(self.optimizers)
        self.notices.what_moves()
        try:
            self.notices.operations("fit")
        except PolicyError:
            self.remove()  # not every library tells a driver that its training has failed
            raise
        if self.measures:
            self.measured = self.measure_phase("fit")
        self._prepare_measuring()
        self.begin()

    def count_from(self, steps: int) -> None:
        """Count steps that were taken without these policies."""
        for each, known in self._steps.items():
            if not known:
                self._steps[each] = steps
                if isinstance(each, MaskedOptimizer):
                    each.effective_steps = steps
        self.updates = max(self.updates, steps)

    @property
    def reads_gradients(self) -> bool:
        """True if :meth:`gradients` shows full gradients in this update to sources or measurements."""
        return self.measures or bool(self._wanted)

    def _hook_gradients(self, freezer: Freezer) -> None:
        """Register hooks on the parameters of freeze policies, including ones that were added later."""
        for name, parameter in freezer.parameters.items():
            if parameter not in self._hooked and parameter.requires_grad:
                self._hooked.add(parameter)
                owner = next(each for each in self.masked_optimizers if _optimizes(each, parameter))
                note = torch.compiler.disable(partial(freezer.note_gradient, name))
                mask = torch.compiler.disable(partial(self._mask_gradient, owner))
                self.hooks.append(parameter.register_hook(note))
                self.hooks.append(parameter.register_post_accumulate_grad_hook(mask))

    def _mask_gradient(self, owner: MaskedOptimizer, parameter: Tensor) -> None:
        """Zero the frozen entries of a gradient, unless :meth:`gradients` does or masks may change before."""
        if self.freezer is not None and parameter in self.freezer.dropped:
            parameter.grad = None
        elif not self.measures and parameter not in self._wanted and len(self._waiting) == len(self._steps):
            owner.mask_gradient(parameter)

    @torch.compiler.disable
    def _before_step(self, observes: bool, optimizer: Any, arguments: tuple, named: dict[str, Any]) -> Any:
        if optimizer not in self._waiting:
            self.end()  # it steps again before the others have
        (closure,) = (*arguments[1:], *named.values()) or (None,)
        if not observes:
            return None
        if closure is None:
            self.gradients(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self.gradients(optimizer)
            return loss

        return arguments[:1], {"closure": observed}

    @torch.compiler.disable
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        steps = getattr(optimizer, "effective_steps", self._steps[optimizer] + 1)
        if steps == self._steps[optimizer]:
            return  # skipped by mixed precision
        self._steps[optimizer] = steps
        self._waiting.discard(optimizer)
        if not self._waiting:
            self.end()

    def _refuse_other_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Check, before a step of any optimizer, that it does not update masked parameters without masks.

        Raises:
            PolicyError: If it does.
        """
        if optimizer in self._steps or any(each.steps_inner for each in self.masked_optimizers):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held = self.freezer.held if self.freezer is not None else {}
        masked: Mapping[str, Tensor] = named_parameters(self.model) if self._masks_all else held
        if names := [name for name, parameter in masked.items() if id(parameter) in stepped]:
            raise PolicyError(
                f"{type(optimizer).__name__}.step would update {shortened(names)} past the policies: call "
                "step() of the optimizer that was wrapped for them (gradpolicy.training returns it), and do "
                "not create another one for these parameters while they train"
            )

    def _reconsidered(self, function: Callable[[], None] | None) -> None:
        """Give mask sources a function that sets the masks of the current update once more."""
        for policy in self.policies.values():
            if isinstance(policy, Freeze):
                policy.mask.reconsider = function

    def _reconsider(self) -> None:
        """Set the masks of the current update once more, since what a source decides by has changed."""
        if self.freezer is not None and self._has_begun:
            self.freezer.reconsider()
            self.begin()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics of an evaluation to mask sources, and set the masks that follow from them."""
        if self.freezer is not None:
            self.freezer.report(metrics)
            self._reconsider()

    def is_finished(self, epoch: int) -> bool:
        """Return True if a mask source ends the training after this number of epochs."""
        return self.freezer is not None and self.freezer.is_finished(self.updates, epoch)

    # ---- evaluation and measurements

    def evaluate(self, phase: str, *, measured: bool = False) -> None:
        """Switch flow policies to an evaluation; :meth:`begin` switches back."""
        if self.installed is not None:
            self.installed.update(phase=phase, step=self.updates, epoch=self.epoch)
            self.installed.measure_norms(measured)
        if measured:
            self._start_measuring().begin(phase)

    def measure(self, when: Callable[[int], bool]) -> None:
        """Measure each update before which this function returns True for the number of updates so far."""
        self._is_measured = when
        self._start_measuring()

    def measure_phase(self, phase: str) -> Measured:
        """Return the measurements of the last update or evaluation, and pass them to the sinks."""
        measured = self._start_measuring().measure(phase)
        measured = {name: each for name, each in measured.items() if _acts_in(self.policies[name], phase)}
        for sink in self.sinks:
            sink(phase, self.updates, measured)
        return measured

    def take_measured(self) -> dict[str, float]:
        """Return the numbers of the last update that was measured, once; empty if there are none."""
        measured, self.measured = self.measured, None
        numbers = summary(measured) if measured is not None else {}
        if measured is not None and not self._has_gradients and self.freezer is not None:
            for name in self.freezer.policies:
                numbers[f"policy/{name}/active_share"] = self.freezer.active_share(name)
        return numbers

    def varying(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers for loggers: each at its first measurement, and again once it has changed."""
        return self._start_measuring().varying(numbers)

    @property
    def _has_gradients(self) -> bool:
        """False if gradients are partitioned, or are freed before the step."""
        freed = any(isinstance(each, StepInBackward) for each in self.hooks)
        return self._partitioned is None and not freed

    def _start_measuring(self) -> Measurements:
        if self.measurements is None:
            # Without gradients only the active shares are known.
            freezer = self.freezer if self._has_gradients else None
            self.measurements = Measurements(freezer, self.installed)
        return self.measurements

    def _prepare_measuring(self) -> None:
        self.measures = self._is_measured is not None and self._is_measured(self.updates)
        if self.measures:
            self._start_measuring().begin()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the mask sources, and the policies of the run."""
        return {
            "policies": {name: repr(policy) for name, policy in self.policies.items()},
            "freezer": pack_masks(self.freezer.state_dict()) if self.freezer is not None else {},
            "measured": self.measurements.state() if self.measurements is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; :meth:`begin` sets its masks."""
        saved, declared = state["policies"], {name: repr(policy) for name, policy in self.policies.items()}
        if saved != declared:
            changed = sorted(name for name in {*saved, *declared} if saved.get(name) != declared.get(name))
            self.notices.warn(
                f"the checkpoint was written under other policies; changed: {', '.join(changed)}"
            )
        if self.freezer is not None and state["freezer"]:
            self.freezer.load_state_dict(unpack_masks(state["freezer"]))
        if self.measurements is not None:
            self.measurements.load_state(state["measured"])

    def _save(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Add the progress of an optimizer to its state_dict, and to the first one's the state of sources.

        It may go through ``torch.distributed.checkpoint``, which loads tensors only in the sizes
        that they have in the loading run, but bytes of any length.
        """
        state = {
            "steps": self._steps[optimizer],
            "waits": optimizer in self._waiting,
            "updates": self.updates,
        }
        if optimizer is self.optimizers[0]:
            state |= self.state_dict()
        torch.save(state, written := io.BytesIO())
        saved["param_groups"][0][STATE] = written.getvalue()

    def _before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state of the policies out of a state_dict that an optimizer is about to load."""
        first, *others = state_dict["param_groups"]
        state = first.get(STATE, {})
        self._loaded[optimizer] = load_file(io.BytesIO(state)) if isinstance(state, bytes) else state
        first = {key: value for key, value in first.items() if key != STATE}
        return {**state_dict, "param_groups": [first, *others]}

    def _after_load(self, optimizer: Any) -> None:
        state = self._loaded.pop(optimizer)
        steps = state.get("steps", getattr(optimizer, "effective_steps", 0))
        self._steps[optimizer], self.updates = steps, state.get("updates", steps)
        if isinstance(optimizer, MaskedOptimizer):
            optimizer.effective_steps = steps
        (self._waiting.add if state.get("waits", True) else self._waiting.discard)(optimizer)
        if self.freezer is not None:
            # Loading has replaced the masks that were set.
            self.freezer.set_anew()
        if "freezer" in state:
            self.load_state_dict(state)
        if self._has_begun:
            self.begin()


_SAVING: "weakref.WeakKeyDictionary[Any, RemovableHandle]" = weakref.WeakKeyDictionary()
"""The hook by which each optimizer saves the state of its latest run."""


def needs_masks(policies: Mapping[str, Policy]) -> bool:
    """Return True if policies act in the optimizer."""
    return any(isinstance(policy, Freeze | Rates) for policy in policies.values())


def wrapped_optimizers(
    model: nn.Module, optimizers: Iterable[Any], policies: Mapping[str, Policy], *, masks_all: bool
) -> list[Any]:
    """Return optimizers of which those with parameters of freeze policies or ``Rates`` have masks.

    Raises:
        PolicyError: If a pattern matches nothing, or version 1 of FSDP has flattened the parameters.
    """
    params = {
        name: policy.restricts if isinstance(policy, Freeze) else policy.params
        for name, policy in policies.items()
        if isinstance(policy, Freeze | Rates)
    }
    if params and any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise flat_parameters_refused()
    matched = pick_each(named_parameters(model), params)
    wanted = {p for parameters in matched.values() for p in parameters.values()}
    return [
        _masked(each, again=masks_all) if masks_all or any(_optimizes(each, p) for p in wanted) else each
        for each in optimizers
    ]


def _masked(optimizer: Any, *, again: bool) -> MaskedOptimizer:
    """Return an optimizer with masks; ``again``: as an earlier run has left it, without its masks."""
    former = wrapper_of(optimizer)
    if former is not None and not again:
        former.set_masks({p: None for group in former.param_groups for p in group["params"]})
        former.effective_steps = 0
    return former or as_masked(optimizer)


def gathered_parameters(optimizers: Iterable[MaskedOptimizer]) -> ExitStack:
    """Context manager that gathers the parameters that an engine has sharded."""
    block = ExitStack()
    for each in optimizers:
        block.enter_context(each.whole_parameters(values=True))
    return block


def flat_parameters_refused() -> PolicyError:
    """Return the error that says why there are no policies under version 1 of FSDP, and what to use."""
    return PolicyError(
        "FSDP: policies are refused under version 1 (FullyShardedDataParallel), which flattens the "
        "parameters of a block into one, in which names, rows and entries are lost; use version 2: "
        "fully_shard, fsdp_version: 2 in accelerate's config, or trainer=fsdp2"
    )


def _unscale(optimizer: Any) -> None:
    """Divide gradients by the loss scale, if a loss scaler has left that to a fused optimizer."""
    if getattr(optimizer, "grad_scale", None) is not None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(optimizer.grad_scale)
        optimizer.grad_scale = None


def _optimizes(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])


def _acts_in(policy: Policy, phase: str) -> bool:
    return isinstance(policy, Freeze) or phase in policy.when.phases


def _cuts(policy: Policy, step: int, epoch: int) -> bool:
    """Return True if a policy cuts the graph in an update, so that parameters may get no gradient."""
    if not isinstance(policy, FlowPolicy) or "fit" not in policy.when.phases:
        return False
    cuts = policy.detaches or (policy.at == "through" and policy.inside == "none")
    return cuts and policy.when.contains(step, epoch)


class Driven:
    """A callback of a library, which drives a run.

    Attributes:
        run: The run.
    """

    run: Run

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies by name."""
        return self.run.policies

    @property
    def installed(self) -> Installed | None:
        """The flow policies on the model, while they are."""
        return self.run.installed

    @property
    def freezer(self) -> Freezer | None:
        """The freezer, which runs the freeze policies."""
        return self.run.freezer

    @property
    def masked_optimizers(self) -> list[MaskedOptimizer]:
        """The optimizers with parameters of freeze policies."""
        return self.run.masked_optimizers
