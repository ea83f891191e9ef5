"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint, state_probe
from gradpolicy.optim.kernels import select
from gradpolicy.optim.layout import fitting_mask
from gradpolicy.optim.masked_parameter import MaskedParameter, Mode, Options
from gradpolicy.optim.other_optimizers import is_torchs_own
from gradpolicy.optim.own_settings import applied, as_settings, check_settings, places_of, with_settings
from gradpolicy.optim.submatrix import in_parts
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.update_rules.schedule_free import ScheduleFreeSGD
from gradpolicy.optim.update_rules.sgd import begin_momenta
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.row_gradient import ActiveRows
from gradpolicy.tensors.sharding import is_sharded, plain_parts

Member = tuple[MaskedParameter, Tensor]
"""A parameter and its gradient."""
FIRST_AGES, MOST_TABLES = 1024, 64
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
        saves_dense: True while a dense state_dict is made.

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

    def __new__(cls, inner: Any = None, *options: Any, **named: Any) -> MaskedOptimizer:
        """Create an instance of the subclass that `Optimizers` needs, or of this class."""
        return super().__new__(getattr(inner, "masked_by", cls) if cls is MaskedOptimizer else cls)

    def __init__(
        self, inner: torch.optim.Optimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        _check_inner(inner)
        self.inner = inner
        self._options = Options().changed(frozen_state=frozen_state, bias_correction=bias_correction)
        self._wrapped = Wrapped(inner)
        self._masked: dict[Tensor, MaskedParameter] = {}
        self.effective_steps = 0
        self._only_probed = False
        # A plain optimizer that has loaded a state_dict of this class keeps what it does not know.
        checkpoint.take_out(self._wrapped)
        self._set_up()

    def _set_up(self) -> None:
        """Set up what `Optimizer.__init__` would, except for what the wrapped optimizer has."""
        _WRAPPERS[self.inner] = weakref.ref(self)
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        for hooks in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self.steps_inner = self.saves_dense = False
        guard = self.inner.register_step_pre_hook(partial(_refuse_to_pass_masks, weakref.ref(self)))
        weakref.finalize(self, guard.remove)
        # The numbers of the rule by age, for the settings that they follow from.
        self._tables: dict[tuple[object, ...], tuple[Tensor, bool]] = {}
        self._closure_needed = self._wrapped.needs_closure
        # Some third-party optimizers, such as SAM, call the closure themselves, more than once.
        described = self._wrapped.rule is not None or self._wrapped.submatrix is not None
        self._calls_closure_itself = not described and not is_torchs_own(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_options", "_wrapped", "_masked", "effective_steps", "_only_probed")
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
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)

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
        switch, state, masked = getattr(self.inner, name, None), self.inner.state, self._masked
        if switch is None:
            return
        before = {p: p.detach().clone() for p, own in masked.items() if not own.is_full}
        dense = {p: masked[p].dense_state() if p in masked else own for p, own in state.items()}
        self.inner.state = defaultdict(dict, dense)
        switch()
        self.inner.state = state
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
        own = {p: as_settings(settings[p], group) for p, group in groups}
        if own and isinstance(self.inner, torch.optim.LBFGS | torch.optim.Rprop):
            kind = type(self.inner).__name__
            raise PolicyError(f"{kind} cannot give parameters rates of their own; use another, such as AdamW")
        self._wrapped.settings = own

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

    @property
    def is_probed(self) -> bool:
        """True if the next step is torch.distributed.checkpoint's, which finds out what state there is."""
        return state_probe.is_probe(self.inner)

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

    def active_rows(self, parameter: Tensor) -> ActiveRows | None:
        """Return the rows, columns or entries to which a gradient can be restricted; None if it cannot."""
        masked = self._masked.get(parameter)
        return None if masked is None else masked.active_rows()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that the next step uses; it may hold some rows only."""
        return parameter.grad

    def _known(self, parameter: Tensor) -> MaskedParameter:
        """Return the masked parameter; a new one, with every entry active, if it never had a mask."""
        masked = self._masked.get(parameter)
        if masked is None:
            self._wrapped.name_of(parameter)
            updates = 0 if self._was_only_probed(parameter) else None
            masked = MaskedParameter(parameter, self._wrapped, self._options, updates)
        return masked

    def _was_only_probed(self, parameter: Tensor) -> bool:
        """Return True if a probe made the state of a parameter, whose first update is still to come."""
        return self._only_probed and not state_probe.has_begun(self._wrapped, parameter)

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
        masked.mask_gradient(gradient)

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
        if closure is None and self.is_probed:
            state_probe.probe(self._wrapped, self._masked.values())
            self._only_probed = True
            return None
        stepped = self._masked.values() if self._closure_needed else work.by_optimizer
        with _hidden_gradients(work.hidden), self._scaling(), in_parts(self._wrapped, work.by_part):
            result = self._step_inner([masked for masked in stepped if not masked.is_full], closure)
        for masked in (*work.by_optimizer, *(masked for masked, _ in work.by_part)):
            masked.count_update()
        for masked in work.on_others:
            masked.count_update_on_others()
        if self._wrapped.rule is not None and work.by_rule:
            self._update_by_rule(self._wrapped.rule, work.by_rule)
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
        """Update all tensors of one dtype and device by one call of a kernel."""
        parameter = members[0][0].parameter
        dtype, device = parameter.dtype.to_real(), parameter.device
        oldest = max([max(masked.ages.oldest, masked.updates) for masked, _ in members])
        rows, is_constant = self._numbers_by_age(rule, group, oldest, dtype, device)
        names, updates = tuple(rule.state(group)), []
        for masked, gradient in members:
            by_tensor = masked.options.bias_correction == "tensor"
            age = 0 if is_constant else masked.updates if by_tensor else None
            updates.append(masked.entry_update(group, names, gradient, age))
        sign, *settings = rule.settings(group)
        # Half-precision weights may have state of full precision, which only the kernels in torch support.
        dtypes = {value.dtype for each in updates for value in (each.gradient, *each.state.values())}
        kernels = select(device, dtype, *dtypes, rule_kernel=rule.kernel)
        kernels.update(rule, (sign / self._scale, *settings), rows, updates)
        for (masked, _), update in zip(members, updates, strict=True):
            for flat, tensor in update.unwritten:
                masked.layout.write_back(flat, tensor)

    def _numbers_by_age(
        self, rule: UpdateRule, group: Group, oldest: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, bool]:
        """Return a row of numbers for each age from 0 updates on, and True if all rows are the same."""
        # Half precision is computed in float32, as by torch's fused optimizers.
        exact = torch.promote_types(dtype, torch.float32)
        settings = rule.age_settings(group)
        key = (settings, exact, device)
        rows, is_constant = self._tables.get(key, (None, False))
        if rows is not None and len(rows) > oldest:
            return rows, is_constant
        length = max(FIRST_AGES, 1 << oldest.bit_length())
        ages = torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
        columns = rule.numbers(ages, *settings)
        rows = torch.stack(columns, 1) if columns else ages.new_zeros(length, 0)
        is_constant = bool((rows == rows[:1]).all())
        if len(self._tables) >= MOST_TABLES:
            # A scheduler may change the betas at every step.
            self._tables.clear()
        self._tables[key] = rows.to(device=device, dtype=exact).contiguous(), is_constant
        return self._tables[key]

    @property
    def _scale(self) -> float:
        """The factor that gradients are multiplied by."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _step_inner(self, frozen: Iterable[MaskedParameter], closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer; frozen entries of these parameters do not change."""
        if self._only_probed:
            state_probe.forget(self._wrapped, self._masked, closure is not None)
            self._only_probed = False
        saved = [(masked, masked.save_frozen()) for masked in frozen]
        if isinstance(self.inner, torch.optim.SGD):
            begin_momenta(self.inner, self._wrapped.group_of, self._scale)
        with applied(self.inner, self._wrapped.settings):
            result = self.inner.step(closure) if closure is not None else self.inner.step()
        for masked, names in saved:
            masked.restore_frozen(names)
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

        It is as small as the state: under `drop` it holds moments of active entries only, and none of tensors
        that are frozen as a whole. For sharded parameters and `torch.distributed.checkpoint` it is dense.

        Args:
            dense: True for moments that torch alone can load: dense, and 0 where `drop` holds none.
        """
        self.saves_dense = dense or checkpoint.must_be_dense(self._wrapped)
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        for parameter in self._wrapped.parameters():
            if is_sharded(parameter):
                self._masked.setdefault(parameter, self._known(parameter))
        result = checkpoint.save(self._wrapped, self._masked, self.effective_steps, dense=self.saves_dense)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        self.saves_dense = False
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, small or dense, or of the wrapped optimizer alone.

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
        records = self._fitting_records(own, saved)
        self.inner.load_state_dict(own)
        # Current masks must not change state that was saved with other masks.
        for parameter, masked in self._masked.items():
            if parameter not in records:
                masked.adopt_state(updates=0 if self._was_only_probed(parameter) else None)
        for parameter, record in records.items():
            self.restore(parameter, record)
        self.effective_steps = self.effective_steps if steps is None else steps
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def restore(self, parameter: Tensor, record: checkpoint.Record) -> None:
        """Restore a parameter's mask and ages from a record that fits; its state is loaded already."""
        checkpoint.restore(self._masked.setdefault(parameter, self._known(parameter)), record)

    def _fitting_records(
        self, own: dict[str, Any], saved: dict[int, checkpoint.Record]
    ) -> dict[Tensor, checkpoint.Record]:
        """Return the records by parameter, all of them checked: a load that fails changes nothing."""
        parameters = self._wrapped.parameters()
        found: dict[Tensor, checkpoint.Record] = {}
        for index, record in saved.items():
            if not 0 <= index < len(parameters):
                raise PolicyError(
                    f"the state_dict has a mask for parameter {index}; "
                    f"the wrapped optimizer has {len(parameters)}, counted from 0"
                )
            masked = self._known(parameters[index])
            name = self._wrapped.name_of(parameters[index])
            checkpoint.check(record, own["state"].get(index, {}), masked, name)
            found[parameters[index]] = record
        return found


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
