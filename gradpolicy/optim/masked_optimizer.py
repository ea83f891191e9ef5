"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint, moving
from gradpolicy.optim.masked_parameter import MaskedParameter, Mode, Options
from gradpolicy.optim.optimizers import Optimizers
from gradpolicy.optim.other_optimizers import is_torchs_own
from gradpolicy.optim.own_settings import applied, as_settings, check_settings, places_of, with_settings
from gradpolicy.optim.put_back import mask_gradient, restore_frozen, save_frozen
from gradpolicy.optim.shapes import fitting_mask, local_entries
from gradpolicy.optim.submatrix import in_parts
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.update_rules.schedule_free import ScheduleFreeSGD
from gradpolicy.optim.update_rules.sgd import begin_momenta
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import plain_parts

Member = tuple[MaskedParameter, Tensor]
"""A parameter and its gradient."""
_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[MaskedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates only the entries that masks leave active.

    Frozen entries keep their value bit for bit, whatever the optimizer, the weight decay or the gradient.
    While every entry is active, the wrapped optimizer's own step runs, untouched. (Schedule-free optimizers
    count for a param group; there a parameter that has had a mask always moves by the update rule.)

    An optimizer with an update rule (Adam, AdamW, SGD and others in `gradpolicy.optim.update_rules.RULES`)
    is exact for every entry: it moves as that optimizer would move it if run on that entry alone, over its
    active steps. `gradpolicy.update_rule` adds an optimizer of your own.

    An optimizer in `SUBMATRIX_RULES` there (Muon, Adafactor) is exact for rows, and Muon for
    columns: it steps the active ones as a parameter of their own.

    Under any other mask or optimizer the whole tensor is stepped; afterwards frozen entries and their state
    are put back. There

    - a step count belongs to the whole tensor,
    - an entry whose state was emptied restarts as at the optimizer's first step: most state at 0, an
      anchor such as Prodigy's `p0` at the entry's present value,
    - "drop" frees memory only for tensors that are frozen as a whole.

    The first mask on some entries of a tensor warns of this. If state has no value for each entry (SOAP,
    Shampoo, 8-bit state), such a mask is an error.

    Args:
        inner: The optimizer to wrap. `param_groups`, `state` and `defaults` are its own.
        frozen_state: What happens to an entry's moments and age while it is frozen. "keep": they are paused.
            "zero": they become 0 when it freezes. "drop": as "zero", and they take no memory.
        bias_correction: "entry": by the entry's own age. "tensor": by the tensor's one step count, as torch
            does when moments are zeroed by hand; it is paused while the whole tensor is frozen.

    Attributes:
        effective_steps: Number of updates so far, without steps that mixed precision skipped. Set it if an
            optimizer is wrapped in the middle of a training.
        steps_inner: True during a step, which calls the wrapped optimizer's step.

    Raises:
        PolicyError: If `inner` is no optimizer, is wrapped already, or is DeepSpeed's, Fabric's,
            accelerate's or a ZeroRedundancyOptimizer, or an option does not exist. Later, if `inner.step` is
            called while entries are frozen.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1), frozen_state="zero")
        >>> optimizer.set_mask(weight, torch.tensor([[True], [False]]))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()[1]
        tensor([1., 1.])
    """

    # True if an engine reduces the gradients, and frozen parameters need not have any.
    allows_unused_parameters = False
    # True for an optimizer whose engine steps and clips partitions of the parameters.
    is_partitioned = False
    # True to get the scale of any GradScaler, which passes it to fused optimizers alone.
    sees_loss_scale = False

    def __init__(
        self, inner: torch.optim.Optimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        # The optimizers that step: the wrapped one, or those that it consists of.
        joined = inner.optimizers if isinstance(inner, Optimizers) else []
        for each in (inner, *joined):
            _check_inner(each)
        self.inner = inner
        self._options = Options().changed(frozen_state=frozen_state, bias_correction=bias_correction)
        self._wrapped = Wrapped(inner)
        self._parts = [Wrapped(each) for each in joined] or [self._wrapped]
        self._masked: dict[Tensor, MaskedParameter] = {}
        self.effective_steps = 0
        # A plain optimizer that has loaded a state_dict of this class keeps what it does not know.
        checkpoint.take_out(inner)
        self._begin_state()
        self._set_up()

    def _begin_state(self) -> None:
        """Give each parameter a state, empty until its first update.

        Without any, torch.distributed.checkpoint would take a first step to create it.
        """
        for part in self._parts:
            # Adagrad creates state itself, and cannot be copied with an empty one.
            for parameter in part.parameters() if not isinstance(part.optimizer, torch.optim.Adagrad) else ():
                self.inner.state.setdefault(parameter, {})

    def _set_up(self) -> None:
        """Set up what `Optimizer.__init__` would, except for what the wrapped optimizer has."""
        for each in {self.inner, *(part.optimizer for part in self._parts)}:
            _WRAPPERS[each] = weakref.ref(self)
            guard = each.register_step_pre_hook(partial(_refuse_to_pass_masks, weakref.ref(self)))
            weakref.finalize(self, guard.remove)
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        for hooks in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self.steps_inner = False
        # Of several optimizers, the one that steps a parameter.
        self._part_of = {
            parameter: part
            for part in self._parts
            for parameter in (part.parameters() if part is not self._wrapped else ())
        }
        self._closure_needed = self._wrapped.needs_closure
        # Some third-party optimizers, such as SAM, call the closure themselves, more than once.
        known = (self._wrapped.rule, self._wrapped.submatrix)
        self._calls_closure_itself = not (
            any(known) or isinstance(self.inner, Optimizers) or is_torchs_own(self.inner)
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_options", "_wrapped", "_parts", "_masked", "effective_steps")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    @property
    def frozen_state(self) -> str:
        """The treatment of frozen entries' state, unless `set_mask` changed it for a parameter."""
        return self._options.frozen_state

    @property
    def bias_correction(self) -> str:
        """The age that bias correction uses, unless `set_mask` changed it for a parameter."""
        return self._options.bias_correction

    # --- attributes of the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state; under "drop" moments are 1-D, of active entries only."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if GradScaler passes its scale on instead of unscaling (fused optimizers)."""
        return self.sees_loss_scale or bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)
        self._begin_state()

    def whole_parameters(self, *, values: bool) -> AbstractContextManager[Any]:
        """Return a context manager in which parameters have their whole shape, and if asked for their values.

        They always do, except those that an engine distributes between forward passes.
        """
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as the wrapped optimizer does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Do what the wrapped optimizer's `train` does, if it has one; frozen entries do not change."""
        self._switch("train")

    def eval(self) -> None:
        """Do what the wrapped optimizer's `eval` does, if it has one; frozen entries do not change."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, name: str) -> None:
        """Let a schedule-free optimizer switch between the weights of training and those of evaluation."""
        state, masked = self.inner.state, self._masked
        switched = [each.optimizer for each in self._parts if hasattr(each.optimizer, name)]
        if not switched:
            return
        before = {p: p.detach().clone() for p, own in masked.items() if not own.is_full}
        dense = {p: masked[p].state.dense(masked[p].ages) if p in masked else own for p, own in state.items()}
        for each in switched:
            each.state = defaultdict(dict, dense)
            getattr(each, name)()
            each.state = state
        for parameter, value in before.items():
            parameter.copy_(torch.where(self.get_mask(parameter), parameter, value))

    # --- masks and settings

    def set_settings(self, settings: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Give parameters settings of their own from the next step on; earlier ones are discarded.

        Args:
            settings: By parameter: a factor on "lr", and values of other settings of its param group. An
                "initial_lr" replaces the rate that schedulers scale; a "rate" is not scaled. Parameters of
                other optimizers are ignored.

        Raises:
            PolicyError: If there is no such setting, or the optimizer is LBFGS, which has one param group, or
                Rprop, which reads its rate at the first step only.
        """
        groups = [(p, group) for group in self.param_groups for p in group["params"] if p in settings]
        for parameter, group in groups:
            check_settings(settings[parameter], group)
        for part in self._parts if groups else ():
            if isinstance(part.optimizer, torch.optim.LBFGS | torch.optim.Rprop):
                kind = type(part.optimizer).__name__
                raise PolicyError(
                    f"{kind} cannot give parameters rates of their own; use another, such as AdamW"
                )
        own = {p: as_settings(settings[p], group) for p, group in groups}
        for part in {self._wrapped, *self._parts}:
            part.settings = own

    def set_mask(
        self,
        parameter: Tensor,
        mask: Any,
        *,
        frozen_state: str | None = None,
        bias_correction: str | None = None,
    ) -> None:
        """Set which entries of a parameter train from the next step on.

        Args:
            parameter: One of the optimizer's parameters.
            mask: Bool tensor that broadcasts to the parameter, True = trains; True or False for all of it;
                or a seeded mask, which has `materialize(shape, device)`; None = all train.
            frozen_state: Replaces the optimizer's for this parameter, from now on.
            bias_correction: Replaces the optimizer's for this parameter, from now on.

        Raises:
            PolicyError: If the parameter is not the optimizer's, the mask is not bool or does not fit, or the
                optimizer was made with differentiable=True or its state has no value for each entry.
        """
        self.set_masks({parameter: mask}, frozen_state=frozen_state, bias_correction=bias_correction)

    def set_masks(
        self,
        masks: Mapping[Tensor, Any],
        *,
        frozen_state: str | None = None,
        bias_correction: str | None = None,
    ) -> None:
        """Set the masks of many parameters; others keep theirs.

        Args:
            masks: By parameter, what `set_mask` takes.
            frozen_state: Replaces the optimizer's for these parameters, from now on.
            bias_correction: Replaces the optimizer's for these parameters, from now on.

        Raises:
            PolicyError: As `set_mask`; masks before the one that is wrong are set.
        """
        # Later steps write to tensors that are created here, even if the caller is in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter, mask in masks.items():
                masked, tensor = self._checked(parameter, mask)
                masked.set_mask(tensor, frozen_state, bias_correction)
                # Only one seeded mask is in memory at a time.
                del tensor

    def _checked(self, parameter: Tensor, mask: Any) -> tuple[MaskedParameter, Tensor | None]:
        """Return the masked parameter, and a mask that fits it."""
        name = self._wrapped.name_of(parameter)
        if hasattr(mask, "materialize"):
            mask = mask.materialize(parameter.shape, parameter.device)
        if mask is not None:
            mask = fitting_mask(mask, parameter, name)
        masked = self._masked.setdefault(parameter, self._known(parameter))
        if mask is not None and masked.group.get("differentiable", False):
            raise PolicyError(f"{name}: an optimizer with differentiable=True cannot freeze entries")
        if (
            isinstance(masked.rule, ScheduleFreeSGD)
            and not masked.group["train_mode"]
            and masked.state.values
        ):
            before = masked.mask().expand(parameter.shape)
            if not torch.equal(before, torch.ones_like(before) if mask is None else mask.expand_as(before)):
                raise PolicyError(f"{name}: call train() of the optimizer before its mask changes")
        return masked, mask

    def get_mask(self, parameter: Tensor) -> Tensor:
        """Return the parameter's mask as it was set (bool, broadcastable to it), all True if none was."""
        return self._known(parameter).mask()

    def age(self, parameter: Tensor) -> Tensor:
        """Return how many updates each entry has had since its moments were last empty (int64)."""
        return self._known(parameter).age()

    def active_share(self, parameter: Tensor | None = None) -> float:
        """Return the share of this process's entries that train: of one parameter, or of all."""
        parameters = self._wrapped.parameters() if parameter is None else [parameter]
        ages = [self._known(each).ages for each in parameters]
        total = sum(each.entries for each in ages)
        return sum(each.active for each in ages) / total if total else 1.0

    def state_bytes(self, parameter: Tensor | None = None) -> int:
        """Return the bytes held on this process for the state of one parameter, or of all.

        That is moments, steps, masks and ages.
        """
        if parameter is None:
            return bytes_of(self.state) + sum(masked.ages.bytes for masked in self._masked.values())
        masked = self._masked.get(parameter)
        return bytes_of(self._wrapped.state_of(parameter)) + (0 if masked is None else masked.ages.bytes)

    def masked_parameters(self) -> Mapping[Tensor, MaskedParameter]:
        """Return each parameter that has, or once had, a mask, with its mask, ages and state."""
        return self._masked

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that the next step uses."""
        return parameter.grad

    def _known(self, parameter: Tensor) -> MaskedParameter:
        """Return the masked parameter; a new one, with every entry active, if it never had a mask."""
        masked = self._masked.get(parameter)
        if masked is None:
            self._wrapped.name_of(parameter)
            part = self._part_of.get(parameter, self._wrapped)
            masked = MaskedParameter(parameter, part, self._options)
        return masked

    # --- steps

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zero gradients of frozen entries in place, NaN too; those of wholly frozen tensors become None.

        Call it before clipping, so that masked gradients do not count in the norm. `step` does not need it.
        """
        for parameter, masked in self._masked.items():
            if masked.frozen_everywhere:
                parameter.grad = None
            else:
                self.mask_gradient(parameter)

    @torch.no_grad()
    def mask_gradient(self, parameter: Tensor) -> None:
        """Zero the gradient of one parameter at frozen entries in place, including NaN and infinity."""
        masked, gradient = self._masked.get(parameter), parameter.grad
        if masked is None or gradient is None or masked.is_full:
            return
        if masked.frozen_everywhere:
            gradient.zero_()
            return
        if gradient.layout is not torch.strided:
            self._refuse_sparse(parameter)
        mask_gradient(masked, gradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active entries.

        Args:
            closure: Reevaluates the model and returns the loss; it runs first, with gradients enabled.

        Returns:
            The closure's result.

        Raises:
            PolicyError: If a gradient is sparse.
        """
        self.steps_inner = True
        try:
            return self._step(closure)
        finally:
            self.steps_inner = False

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor) -> None:
        """Update one parameter now, before the others.

        Once all are, call `step`, which counts the update; parameters without a gradient do not change in it.
        """
        before, updates = self.steps_inner, self.effective_steps
        owner = self._part_of.get(parameter, self._wrapped)
        self.steps_inner = True
        try:
            with ExitStack() as stack:
                for part in dict.fromkeys((self._wrapped, *self._parts)):
                    is_owner = part is owner or part is self._wrapped
                    stack.enter_context(part.restricted_to(parameter if is_owner else None))
                self._update(None)
        finally:
            self.steps_inner, self.effective_steps = before, updates

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._closure_needed or (closure is not None and self._calls_closure_itself):
            return self._update(self._masking(closure))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        if found is not None and float(found):
            return loss
        result = self._update(None)
        return result if closure is None else loss

    def _masking(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        if closure is None:
            raise PolicyError(f"{type(self.inner).__name__}.step needs a closure")

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.mask_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """Update once: by the wrapped optimizer where that is exact, then by the rule for the rest."""
        work = self._sorted(closure is not None)
        stepped = self._masked.values() if self._closure_needed else work.by_optimizer
        with ExitStack() as stack:
            stack.enter_context(_hidden_gradients(work.hidden))
            stack.enter_context(self._scaling())
            for part in self._parts:
                stack.enter_context(in_parts(part, [m for m in work.by_part if m[0].state.wrapped is part]))
            result = self._step_inner([masked for masked in stepped if not masked.is_full], closure)
        for masked in (*work.by_optimizer, *(masked for masked, _ in work.by_part)):
            masked.count_update()
        for masked in work.on_others:
            masked.set_count(masked.updates + 1)
        for part in self._parts:
            # A param group is of one optimizer.
            groups = [(g, m) for g, m in work.by_rule if m[0][0].state.wrapped is part]
            if part.rule is not None and groups:
                self._update_by_rule(part.rule, groups)
        self.effective_steps += 1
        return result

    def _sorted(self, closure: bool) -> _Work:
        """Sort masked parameters by how this step treats them.

        Args:
            closure: True if the wrapped optimizer makes the gradients itself.
        """
        work = _Work()
        for group in self.param_groups:
            members: list[Member] = []
            for parameter in group["params"]:
                gradient, masked = parameter.grad, self._masked.get(parameter)
                if gradient is not None and gradient.layout is not torch.strided:
                    self._refuse_sparse(parameter)
                mode = Mode.PLAIN if masked is None else masked.mode
                if mode is Mode.PLAIN or mode is Mode.PUT_BACK:
                    if masked is not None and (gradient is not None or closure):
                        work.by_optimizer.append(masked)
                elif masked is not None and gradient is not None:
                    work.hidden.append(parameter)
                    if mode is Mode.BY_RULE:
                        members.append((masked, gradient))
                    elif mode is Mode.BY_PART:
                        work.by_part.append((masked, gradient))
                    elif mode is Mode.ON_OTHERS:
                        work.on_others.append(masked)
            for own, places in places_of([m.parameter for m, _ in members], self._wrapped.settings).items():
                work.by_rule.append((with_settings(group, own), [members[place] for place in places]))
        return work

    def _update_by_rule(self, rule: UpdateRule, groups: list[tuple[Group, list[Member]]]) -> None:
        """Update the active entries of parameters by the rule, and count the update."""
        steps: list[Tensor] = []
        for group, members in groups:
            together: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
            for member in members:
                parameter = member[0].parameter
                together.setdefault((parameter.dtype, parameter.device), []).append(member)
            for own in together.values():
                self._update_alike(rule, group, own)
            for masked, _ in members:
                masked.count_update()
            counts = rule.tensor_state(group, 0).keys()
            if counts - {"step"}:
                for masked, _ in members:
                    masked.state.set_count(masked.updates)
            elif counts:
                steps += [masked.state.values["step"] for masked, _ in members]
        if steps and all(step.is_cpu for step in steps):
            # A Python number would be converted to a tensor for each of them.
            torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
        elif steps:
            torch._foreach_add_(steps, 1)
        # Autograd must detect that values it may have saved have changed.
        torch.autograd.graph.increment_version([m.parameter for _, members in groups for m, _ in members])

    def _update_alike(self, rule: UpdateRule, group: Group, members: list[Member]) -> None:
        """Update tensors of one dtype and device."""
        entries = []
        for masked, gradient in members:
            masked.follow()
            by_tensor = masked.options.bias_correction == "tensor"
            entries.append(
                moving.Entries(
                    local_entries(masked.parameter),
                    local_entries(gradient),
                    masked.state.completed(group, masked.ages, masked.updates),
                    masked.ages,
                    masked.updates if by_tensor else None,
                    masked.weights,
                )
            )
        moving.update(rule, group, self._scale, entries)

    @property
    def _scale(self) -> float:
        """The factor that gradients are multiplied by."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _step_inner(self, frozen: Iterable[MaskedParameter], closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer; frozen entries of these parameters do not change."""
        saved = [(masked, save_frozen(masked)) for masked in frozen]
        with ExitStack() as stack:
            for part in self._parts:
                if isinstance(part.optimizer, torch.optim.SGD):
                    begin_momenta(part.optimizer, part.group_of, self._scale)
                stack.enter_context(applied(part.optimizer, part.settings))
            result = self.inner.step(closure) if closure is not None else self.inner.step()
        for masked, values in saved:
            restore_frozen(masked, values)
        return result

    @contextmanager
    def _scaling(self) -> Iterator[None]:
        """Pass what GradScaler has set on this optimizer to the wrapped one."""
        given = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        try:
            for name, value in given.items():
                setattr(self.inner, name, value)
            yield
        finally:
            for name in given:
                delattr(self.inner, name)

    def _refuse_sparse(self, parameter: Tensor) -> NoReturn:
        raise PolicyError(
            f"{self._wrapped.name_of(parameter)} has a sparse gradient; MaskedOptimizer needs dense ones "
            "(for an embedding: sparse=False, and a mask of rows)"
        )

    # --- saving and loading

    @torch.no_grad()
    def state_dict(self, *, dense: bool = False) -> dict[str, Any]:
        """Return the wrapped optimizer's own state_dict, with masks and ages beside it under "gradpolicy".

        Under `drop` it has moments of active entries only, and none of tensors that are frozen entirely.

        Args:
            dense: True for moments that torch alone can load: dense, and 0 where there are none. Those of
                sharded parameters always are.
        """
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        result = checkpoint.save(self.inner, self._all_masked(), self.effective_steps, dense=dense)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, compact or dense, or of the wrapped optimizer alone.

        Masks and ages become the saved ones. If there are none, masks stay and every entry's age becomes its
        tensor's step count.

        Raises:
            PolicyError: If a saved mask, its ages or state do not fit their parameter, or there is no such
                parameter; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own, steps, saved = checkpoint.split(state_dict)
        masked = self._all_masked()
        records = checkpoint.fitting_records(own, saved, masked)
        self.inner.load_state_dict(own)
        self._begin_state()
        for index, each in enumerate(masked):
            if index in records:
                checkpoint.restore(each, records[index])
                self._masked.pop(each.parameter, None)
                if each.had_mask:
                    self._masked[each.parameter] = each
            elif each.parameter in self._masked:
                # Current masks must not change state that was saved with other masks.
                each.adopt_state()
        self.effective_steps = self.effective_steps if steps is None else steps
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _all_masked(self) -> list[MaskedParameter]:
        """Return each parameter with its mask."""
        return [self._known(parameter) for parameter in self._wrapped.parameters()]


@dataclass(slots=True)
class _Work:
    """The work of one step.

    Attributes:
        by_rule: Parameters that the update rule moves, with their gradients, by param group.
        by_part: Parameters whose active rows or columns the wrapped optimizer updates, with their gradients.
        by_optimizer: Masked parameters that the wrapped optimizer updates.
        on_others: Masked parameters that only other processes update.
        hidden: Parameters whose gradients the wrapped optimizer must not apply.
    """

    by_rule: list[tuple[Group, list[Member]]] = field(default_factory=list)
    by_part: list[Member] = field(default_factory=list)
    by_optimizer: list[MaskedParameter] = field(default_factory=list)
    on_others: list[MaskedParameter] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


@contextmanager
def _hidden_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hide the gradients of parameters in the block."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def bytes_of(state: Mapping[Any, Any]) -> int:
    """Return the bytes of an optimizer's state on this process; some of it may belong to no parameter."""
    total = 0
    for value in state.values():
        if isinstance(value, Tensor):
            total += sum(part.nbytes for part in plain_parts(value))
        elif isinstance(value, Mapping):
            total += bytes_of(value)
    return total


def wrapper_of(optimizer: torch.optim.Optimizer) -> MaskedOptimizer | None:
    """Return the MaskedOptimizer that wraps an optimizer, if there is one."""
    present = _WRAPPERS.get(optimizer)
    return None if present is None else present()


def as_masked(optimizer: torch.optim.Optimizer) -> MaskedOptimizer:
    """Wrap an optimizer unless it is a MaskedOptimizer."""
    return optimizer if isinstance(optimizer, MaskedOptimizer) else MaskedOptimizer(optimizer)


def deepspeed_refused(what: str, instead: str = "give it the engine") -> PolicyError:
    """Return the error that says where policies work under DeepSpeed, and what to do instead."""
    return PolicyError(
        f"{what}: freeze policies are refused under DeepSpeed except under Lightning's and Hugging Face's "
        "Trainer and in a loop of your own, with gradpolicy.integrations.deepspeed.training: its engine "
        f"updates partitions of the weights within its own step; {instead}"
    )


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        raise PolicyError(f"inner: a torch.optim.Optimizer is needed, not {type(inner).__name__}")
    package, kind = type(inner).__module__.partition(".")[0], type(inner).__name__
    if package == "deepspeed":
        raise deepspeed_refused(kind)
    if kind == "ZeroRedundancyOptimizer":
        raise PolicyError(f"inner: {kind} is refused; FSDP2 (fully_shard) shards optimizer state under masks")
    if package in ("accelerate", "lightning", "lightning_fabric"):
        raise PolicyError(
            f"inner: {kind} passes steps on to an optimizer of its own; wrap the torch "
            "optimizer first, and prepare or set up what MaskedOptimizer or gradpolicy.training gives"
        )
    if isinstance(inner, MaskedOptimizer) or wrapper_of(inner) is not None:
        raise PolicyError(
            "inner: this optimizer is wrapped by a MaskedOptimizer already; set its masks there"
        )


def _refuse_to_pass_masks(
    wrapper: weakref.ref[MaskedOptimizer], inner: torch.optim.Optimizer, *_: Any
) -> None:
    """Refuse a step of a wrapped optimizer that bypasses its masks; a hook that runs before each step.

    Raises:
        PolicyError: If entries are frozen, and the step is not the wrapper's.
    """
    masking = wrapper()
    if masking is None or masking.steps_inner:
        return
    if not all(masked.is_full for masked in masking.masked_parameters().values()):
        kind = type(inner).__name__
        raise PolicyError(
            f"{kind}.step was called past the MaskedOptimizer that wraps it, and would move frozen entries; "
            "call step() of the MaskedOptimizer, or lift its masks with set_masks({parameter: None, ...})"
        )
