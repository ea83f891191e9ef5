"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, partialmethod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint
from gradpolicy.optim.masked_parameter import MaskedParameter, Options
from gradpolicy.optim.optimizers import Optimizers
from gradpolicy.optim.own_settings import as_settings, check_settings
from gradpolicy.optim.put_back import mask_gradient
from gradpolicy.optim.step import refuse_sparse, switch, update
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.sharding import plain_parts

_AMP = "_step_supports_amp_scaling"
_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[MaskedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def _of_inner(name: str) -> Any:
    """Return a property that is an attribute of the wrapped optimizer."""
    return property(attrgetter(f"inner.{name}"), lambda self, value: setattr(self.inner, name, value))


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
        masked: Each parameter that has, or once had, a mask, with its mask, ages and state.
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

    inner: torch.optim.Optimizer
    masked: dict[Tensor, MaskedParameter]
    effective_steps: int
    _options: Options
    _wrapped: Wrapped
    _parts: list[Wrapped]
    # True if an engine reduces the gradients, and frozen parameters need not have any.
    allows_unused_parameters = False
    # True for an optimizer whose engine steps and clips partitions of the parameters.
    is_partitioned = False
    # True to get the scale of any GradScaler, which passes it to fused optimizers alone.
    sees_loss_scale = False

    # Under "drop" the state of single entries is 1-D, of active entries only.
    param_groups, state, defaults = _of_inner("param_groups"), _of_inner("state"), _of_inner("defaults")
    # GradScaler passes its scale on to fused optimizers instead of unscaling.
    _step_supports_amp_scaling = property(
        lambda self: self.sees_loss_scale or bool(getattr(self.inner, _AMP, False))
    )
    # What holds unless `set_mask` changed it for a parameter.
    frozen_state: Any = property(attrgetter("_options.frozen_state"))
    bias_correction: Any = property(attrgetter("_options.bias_correction"))

    def __init__(
        self, inner: torch.optim.Optimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        # The optimizers that step: the wrapped one, or those that it consists of.
        joined = inner.optimizers if isinstance(inner, Optimizers) else []
        for each in (inner, *joined):
            _check_inner(each)
        options = Options().changed(frozen_state=frozen_state, bias_correction=bias_correction)
        wrapped = Wrapped(inner)
        parts = [Wrapped(each) for each in joined] or [wrapped]
        # A plain optimizer that has loaded a state_dict of this class keeps what it does not know.
        checkpoint.take_out(inner)
        own = {"inner": inner, "_options": options, "_wrapped": wrapped, "_parts": parts}
        self.__setstate__({**own, "masked": {}, "effective_steps": 0})
        wrapped.begin_state()

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_options", "_wrapped", "_parts", "masked", "effective_steps")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # what `Optimizer.__init__` would set up
        self.steps_inner = False
        for each in {self.inner, *(part.optimizer for part in self._parts)}:
            _WRAPPERS[each] = weakref.ref(self)
            guard = each.register_step_pre_hook(partial(_refuse_to_pass_masks, weakref.ref(self)))
            weakref.finalize(self, guard.remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)
        self._wrapped.begin_state()

    def whole_parameters(self, *, values: bool) -> AbstractContextManager[Any]:
        """Return a context manager in which parameters have their full shape, and if asked for their values.

        They always do, except those that an engine distributes between forward passes.
        """
        return nullcontext()

    # Schedule-free optimizers switch between the weights of training and those of evaluation; frozen entries
    # do not change.
    train, eval = partialmethod(switch, "train"), partialmethod(switch, "eval")

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
                masked = self._known(parameter)
                masked.set_mask(mask, frozen_state, bias_correction)
                self.masked[parameter] = masked

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

        That is moments, steps, masks, ages and, where entries of a parameter have many ages, what follows
        from these for bias correction.
        """
        if parameter is None:
            return _bytes_of(self.state) + sum(masked.bytes for masked in self.masked.values())
        masked = self.masked.get(parameter)
        return _bytes_of(self._wrapped.state_of(parameter)) + (0 if masked is None else masked.bytes)

    def _known(self, parameter: Tensor) -> MaskedParameter:
        """Return the masked parameter; a new one, with every entry active, if it never had a mask."""
        if parameter in self.masked:
            return self.masked[parameter]
        self._wrapped.name_of(parameter)  # raises if it is not the optimizer's
        part = next((each for each in self._parts if each.has(parameter)), self._wrapped)
        return MaskedParameter(parameter, part, self._options)

    # --- steps

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zero gradients of frozen entries in place, NaN too; those of completely frozen tensors become None.

        Call it before clipping, so that masked gradients do not count in the norm. `step` does not need it.
        """
        for parameter, masked in self.masked.items():
            if masked.frozen_everywhere:
                parameter.grad = None
            else:
                self.mask_gradient(parameter)

    @torch.no_grad()
    def mask_gradient(self, parameter: Tensor) -> None:
        """Zero the gradient of one parameter at frozen entries in place, including NaN and infinity."""
        masked, gradient = self.masked.get(parameter), parameter.grad
        if masked is None or gradient is None or masked.is_full:
            return
        if masked.frozen_everywhere:
            gradient.zero_()
            return
        refuse_sparse(gradient, masked.name)
        mask_gradient(masked, gradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active entries.

        Args:
            closure: Reevaluates the model and returns the loss; it runs first, with gradients enabled.

        Returns:
            The closure's result.

        Raises:
            PolicyError: If a gradient is sparse, or the wrapped optimizer needs a closure.
        """

        def evaluate() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self.mask_gradients()
            return loss

        if closure is None and self._wrapped.needs_closure:
            raise PolicyError(f"{type(self.inner).__name__}.step needs a closure")
        self.steps_inner = True
        try:
            if closure is not None and self._wrapped.calls_closure:
                return self._update(evaluate)
            with torch.enable_grad():
                loss = None if closure is None else closure()
            found = getattr(self, "found_inf", None)
            if found is not None and float(found):
                return loss
            result = self._update(None)
            return result if closure is None else loss
        finally:
            self.steps_inner = False

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor) -> None:
        """Update one parameter now, before the others.

        Once all are, call `step`, which counts the update; parameters without a gradient do not change in it.
        """
        before, updates = self.steps_inner, self.effective_steps
        self.steps_inner = True
        try:
            with ExitStack() as stack:
                for each in dict.fromkeys((self._wrapped, *self._parts)):
                    stack.enter_context(each.restricted_to(parameter))
                self._update(None)
        finally:
            self.steps_inner, self.effective_steps = before, updates

    @torch.no_grad()
    def _update(self, closure: Callable[[], Any] | None) -> Any:
        scaling = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        result = update(self._wrapped, self._parts, self.masked, scaling, closure)
        self.effective_steps += 1
        return result

    # --- saving and loading

    @torch.no_grad()
    def state_dict(self, *, dense: bool = False) -> dict[str, Any]:
        """Return the wrapped optimizer's own state_dict, with masks and ages beside it under "gradpolicy".

        Under `drop` it has moments of active entries only, and none of tensors that are frozen entirely.

        Args:
            dense: True for moments that torch alone can load: dense, and 0 where there are none. Those of
                sharded parameters always are.
        """
        every = [self._known(parameter) for parameter in self._wrapped.parameters()]
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        result = checkpoint.save(self.inner, every, self.effective_steps, dense=dense)
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
        masked = [self._known(parameter) for parameter in self._wrapped.parameters()]
        records = checkpoint.fitting_records(own, saved, masked)
        self.inner.load_state_dict(own)
        for index, each in enumerate(masked):
            if index in records:
                checkpoint.restore(each, records[index])
                self.masked.pop(each.parameter, None)
                if each.had_mask:
                    self.masked[each.parameter] = each
            elif each.parameter in self.masked:
                # Current masks must not change state that was saved with other masks.
                each.adopt_state()
        self._wrapped.begin_state()
        self.effective_steps = self.effective_steps if steps is None else steps
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _bytes_of(state: Mapping[Any, Any]) -> int:
    """Return the bytes of an optimizer's state on this process; some of it may belong to no parameter."""
    total = 0
    for value in state.values():
        if isinstance(value, Tensor):
            total += sum(part.nbytes for part in plain_parts(value))
        elif isinstance(value, Mapping):
            total += _bytes_of(value)
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
    if not all(masked.is_full for masked in masking.masked.values()):
        kind = type(inner).__name__
        raise PolicyError(
            f"{kind}.step was called past the MaskedOptimizer that wraps it, and would move frozen entries; "
            "call step() of the MaskedOptimizer, or lift its masks with set_masks({parameter: None, ...})"
        )
