"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, partialmethod
from operator import attrgetter
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradpolicy.errors import PolicyError, shown
from gradpolicy.optim import checkpoint, moving
from gradpolicy.optim.masked_parameter import MaskedParameter, Mode, NewOptions, Options
from gradpolicy.optim.put_back import mask_gradient, restore_frozen, save_frozen
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.update_rules.master_weights import DTYPES
from gradpolicy.optim.wrapped import Wrapped
from gradpolicy.tensors.checkpoint_file import reading
from gradpolicy.tensors.sharding import plain_parts

_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[MaskedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def _of_inner(name: str) -> Any:
    """Return a property that is an attribute of the wrapped optimizer."""
    return property(attrgetter(f"inner.{name}"), lambda self, value: setattr(self.inner, name, value))


@torch.no_grad()
def _switch(masking: MaskedOptimizer, name: str) -> None:
    """Call the `train` or `eval` of the wrapped optimizers that have it; frozen entries do not change."""
    masked = masking.masked
    for part in masking._wrapped.parts:
        optimizer: Any = part.optimizer
        if not hasattr(optimizer, name):
            continue
        state = optimizer.state
        before = {p: p.detach().clone() for p, each in masked.items() if not each.is_full}
        dense = {p: masked[p].dense() if p in masked else own for p, own in state.items()}
        optimizer.state = defaultdict(dict, dense)
        getattr(optimizer, name)()
        optimizer.state = state
        for parameter, value in before.items():
            parameter.copy_(torch.where(masked[parameter].mask(), parameter, value))


@torch.no_grad()
def _take_out(optimizer: MaskedOptimizer) -> None:
    """Make state dense that a plain optimizer has loaded, and remove the records from its groups."""
    optimizer.load_state_dict(optimizer.inner.state_dict())
    for parameter, each in optimizer.masked.items():
        if each.values:
            optimizer.state[parameter] = checkpoint.filled(each)
    optimizer.masked, optimizer.effective_steps = {}, 0


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates only the entries that masks leave active.

    Frozen entries keep their value bit for bit, whatever the optimizer, the weight decay or the gradient.
    While every entry is active, the wrapped optimizer's own step runs, untouched. (Schedule-free optimizers
    count for a param group; there a parameter that has had a mask always moves by the update rule.)

    An optimizer with an update rule (Adam, AdamW, SGD and others in `gradpolicy.optim.update_rules.RULES`)
    is exact for every entry: it moves as that optimizer would move it if run on that entry alone, over its
    active steps. `gradpolicy.update_rule` adds an optimizer of your own.

    Another optimizer steps the full tensor; afterwards frozen entries and their state are put back. In the
    step frozen gradients and, with torch's own optimizers such as Muon, frozen state count as nothing. There

    - a step count belongs to the full tensor,
    - an entry whose state was emptied restarts as at the optimizer's first step: most state at 0, an
      anchor such as Prodigy's `p0` at the entry's present value,
    - "drop" frees memory only for tensors that are frozen completely.

    The first mask on some entries of a tensor warns of this. If state has no value for each entry (SOAP,
    Shampoo, 8-bit state), such a mask is an error.

    Args:
        inner: The optimizer to wrap. `param_groups`, `state` and `defaults` are its own.
        frozen_state: What happens to an entry's moments and age while it is frozen. "keep": they are paused.
            "zero": they become 0 when it freezes. "drop": as "zero", and they take no memory.
        bias_correction: "entry": by the entry's own age. "tensor": by the tensor's one step count, as torch
            does when moments are zeroed by hand; it is paused while the full tensor is frozen.
        master_weights: Update bfloat16 and float16 parameters as float32: 16 more bits are kept of each
            active entry, and moments are float32. A frozen entry loses the 16 bits under "drop" alone.

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
    # True if an engine reduces the gradients, and frozen parameters need not have any.
    allows_unused_parameters = False
    # The number of updates when masks were last set.
    masks_set_at = 0
    # The parameters that mask sources may have written to since then.
    written: Collection[Tensor] = ()
    # True for an optimizer whose engine steps and clips partitions of the parameters.
    is_partitioned = False
    # True to notice a GradScaler, which then passes its scale on instead of unscaling gradients.
    sees_loss_scale = False

    # Under "drop" the state of single entries is 1-D, of active entries only.
    param_groups, state, defaults = _of_inner("param_groups"), _of_inner("state"), _of_inner("defaults")
    _step_supports_amp_scaling = property(attrgetter("sees_loss_scale"))
    # What holds unless `set_mask` changed it for a parameter.
    frozen_state: Any = property(attrgetter("_options.frozen_state"))
    bias_correction: Any = property(attrgetter("_options.bias_correction"))
    master_weights: Any = property(attrgetter("_options.master_weights"))

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        frozen_state: str = "keep",
        bias_correction: str = "entry",
        master_weights: bool = False,
    ) -> None:
        _check_inner(inner)
        wrapped = Wrapped(inner)
        for part in wrapped.parts:
            _check_inner(part.optimizer)
        options = Options().changed(
            frozen_state=frozen_state, bias_correction=bias_correction, master_weights=master_weights
        )
        own = {"inner": inner, "_options": options, "_wrapped": wrapped}
        self.__setstate__({**own, "masked": {}, "effective_steps": 0})
        if any(checkpoint.KEY in group for group in inner.param_groups):
            _take_out(self)
        wrapped.begin_state()
        if master_weights:
            keep_master_weights(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_options", "_wrapped", "masked", "effective_steps")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # what `Optimizer.__init__` would set up
        self.steps_inner = False
        for each in {self.inner, *(part.optimizer for part in self._wrapped.parts)}:
            _WRAPPERS[each] = weakref.ref(self)
            guard = each.register_step_pre_hook(partial(_refuse_to_pass_masks, weakref.ref(self)))
            weakref.finalize(self, guard.remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)
        self._wrapped.begin_state()
        if self.master_weights:
            keep_master_weights(self)

    def full_parameters(self, *, values: bool) -> AbstractContextManager[Any]:
        """Return a context manager in which parameters have their full shape, and if asked for their values.

        They always do, except those that an engine distributes between forward passes.
        """
        return nullcontext()

    # Schedule-free optimizers switch between the weights of training and those of evaluation.
    train, eval = partialmethod(_switch, "train"), partialmethod(_switch, "eval")

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
        self._wrapped.set_settings(settings)

    def set_mask(self, parameter: Tensor, mask: Any, **options: Unpack[NewOptions]) -> None:
        """Set which entries of a parameter train from the next step on.

        Args:
            parameter: One of the optimizer's parameters.
            mask: Bool tensor that broadcasts to the parameter, True = trains; True or False for all of it;
                or a seeded mask, which has `materialize(shape, device)`; None = all train.
            **options: `frozen_state`, `bias_correction` and `master_weights` replace the optimizer's for this
                parameter from now on. Master weights stay once there are any.

        Raises:
            PolicyError: If the parameter is not the optimizer's, the mask is not bool or does not fit, or the
                optimizer was made with differentiable=True or its state has no value for each entry.
        """
        self.set_masks({parameter: mask}, **options)

    def set_masks(self, masks: Mapping[Tensor, Any], **options: Unpack[NewOptions]) -> None:
        """Set the masks of many parameters; others keep theirs.

        Args:
            masks: By parameter, what `set_mask` takes.
            **options: As for `set_mask`.

        Raises:
            PolicyError: As `set_mask`; masks before the one that is wrong are set.
        """
        if not isinstance(masks, Mapping):
            raise PolicyError(f"set_masks: expected a dict from parameters to masks, got {shown(masks)}")
        self.masks_set_at = self.effective_steps
        # Later steps write to tensors that are created here, even if the caller is in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter, mask in masks.items():
                masked = self._known(parameter)
                masked.set_mask(mask, **options)
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
        return MaskedParameter(parameter, self._wrapped.part_of(parameter), self._options)

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
        _refuse_sparse(gradient, masked.name)
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
            result = self._update(None)
            return result if closure is None else loss
        finally:
            self.steps_inner = False

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor) -> None:
        """Update one parameter now, before the others.

        Once all are, call `step`, which counts the update; parameters without a gradient do not change in it.
        """
        before, self.steps_inner = self.steps_inner, True
        try:
            _update(self._wrapped, self.masked, only=parameter)
        finally:
            self.steps_inner = before

    @torch.no_grad()
    def _update(self, closure: Callable[[], Any] | None) -> Any:
        result = _update(self._wrapped, self.masked, closure)
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
    @reading("load_state_dict: the state_dict")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class, compact or dense, or of the wrapped optimizer alone.

        Masks and ages become the saved ones. If there are none, masks stay and every entry's age becomes its
        tensor's step count.

        Raises:
            PolicyError: If a saved mask, its ages or state do not fit their parameter, or there is no such
                parameter; nothing is loaded then.
        """
        state_dict = checkpoint.copied(state_dict)
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


# --- one update

ByRule = list[tuple[UpdateRule, Group, list[MaskedParameter]]]
"""The parameters that update rules move, by param group."""


def _update(
    wrapped: Wrapped,
    masked: Mapping[Tensor, MaskedParameter],
    closure: Callable[[], Any] | None = None,
    only: Tensor | None = None,
) -> Any:
    """Update once: by the wrapped optimizer where that is exact, then by the rule for the rest.

    Args:
        wrapped: The wrapped optimizer.
        masked: The parameters that have, or once had, a mask.
        closure: Passed to the wrapped optimizer, which then makes the gradients itself.
        only: The one parameter that is updated; None: all.

    Returns:
        The result of the wrapped optimizer's step.

    Raises:
        PolicyError: If a gradient is sparse.
    """
    by_rule, others = _sorted(wrapped, masked, closure is not None, only)
    hidden = [each for *_, members in by_rule for each in members]
    hidden += others[Mode.FROZEN]
    by_optimizer = [*others[Mode.PLAIN], *others[Mode.PUT_BACK]]
    with ExitStack() as stack:
        for each in masked.values() if wrapped.needs_closure else by_optimizer:
            if not each.is_full:
                stack.callback(restore_frozen, each, save_frozen(each))
        for parameter in (each.parameter for each in hidden):
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        for part in wrapped.parts:
            stack.enter_context(part.stepping(only))
        step = wrapped.optimizer.step
        result = step(closure) if closure is not None else step()
    for each in by_optimizer:
        each.count_update()
    for each in others[Mode.FROZEN]:
        if not each.frozen_everywhere:  # it trains on other processes
            each.set_count(each.updates + 1)
    _move(by_rule)
    return result


def _sorted(
    wrapped: Wrapped, masked: Mapping[Tensor, MaskedParameter], makes_gradients: bool, only: Tensor | None
) -> tuple[ByRule, dict[Mode, list[MaskedParameter]]]:
    """Sort masked parameters by how this step treats them."""
    by_rule: ByRule = []
    others: dict[Mode, list[MaskedParameter]] = defaultdict(list)
    for group, parameters in wrapped.groups(only):
        members: dict[UpdateRule, list[MaskedParameter]] = {}
        for parameter in parameters:
            gradient, each = parameter.grad, masked.get(parameter)
            if gradient is not None and gradient.layout is not torch.strided:
                _refuse_sparse(gradient, wrapped.name_of(parameter))
            if each is not None and (gradient is not None or makes_gradients):
                mode, rule = each.mode, each.rule
                if rule is not None and mode is Mode.BY_RULE:
                    members.setdefault(rule, []).append(each)
                else:
                    others[mode].append(each)
        by_rule += [(rule, group, alike) for rule, alike in members.items()]
    return by_rule, others


def _refuse_sparse(gradient: Tensor, name: str) -> None:
    """Check that a gradient is dense.

    Raises:
        PolicyError: If it is not.
    """
    if gradient.layout is not torch.strided:
        raise PolicyError(
            f"{name} has a sparse gradient; MaskedOptimizer needs dense ones "
            "(for an embedding: sparse=False, and a mask of rows; or its own optimizer without policies)"
        )


def _move(work: ByRule) -> None:
    """Update the active entries of parameters by their rules, and count the update."""
    steps: list[Tensor] = []
    for rule, group, members in work:
        together: dict[tuple[torch.dtype, torch.device], list[MaskedParameter]] = defaultdict(list)
        for each in members:
            together[each.parameter.dtype, each.parameter.device].append(each)
        for alike in together.values():
            moving.update(rule, group, alike)
        counts = rule.tensor_state(group, 0).keys()
        for each in members:
            each.count_update()
            if counts - {"step"}:
                each.set_count(each.updates)
            elif counts:
                steps.append(each.values["step"])
    if steps:
        # On a CPU a Python number would be converted to a tensor for each of them.
        on_cpu = all(step.is_cpu for step in steps)
        torch._foreach_add_(steps, torch.tensor(1.0, device="cpu") if on_cpu else 1.0)
    # Autograd must detect that values it may have saved have changed.
    torch.autograd.graph.increment_version([each.parameter for *_, members in work for each in members])


# --- wrapped optimizers


def _bytes_of(state: Mapping[Any, Any]) -> int:
    """Return the bytes of an optimizer's state on this process; some of it may belong to no parameter."""
    tensors = [each for each in tree_leaves(dict(state)) if isinstance(each, Tensor)]
    return sum(part.nbytes for each in tensors for part in plain_parts(each))


def wrapper_of(optimizer: torch.optim.Optimizer) -> MaskedOptimizer | None:
    """Return the MaskedOptimizer that wraps an optimizer, if there is one."""
    present = _WRAPPERS.get(optimizer)
    return None if present is None else present()


@torch.no_grad()
def keep_master_weights(optimizer: MaskedOptimizer) -> None:
    """Update all bfloat16 and float16 parameters of an optimizer as float32 from the next step on.

    Raises:
        PolicyError: If no update rule describes the optimizer of one of them.
    """
    if optimizer.is_partitioned:
        return  # the engine itself updates float32 weights
    optimizer._options = optimizer._options._replace(master_weights=True)
    parameters = (each for each in optimizer._wrapped.parameters() if each.dtype in DTYPES)
    kept = {each: optimizer.get_mask(each) if each in optimizer.masked else None for each in parameters}
    optimizer.set_masks(kept, master_weights=True)


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
    masked = masking.masked.values()
    if any(each.has_master_weights for each in masked):
        raise PolicyError(
            f"{type(inner).__name__}.step does not know master_weights; call step() of its MaskedOptimizer"
        )
    if not all(each.is_full for each in masked):
        kind = type(inner).__name__
        raise PolicyError(
            f"{kind}.step was called past the MaskedOptimizer that wraps it, and would move frozen entries; "
            "call step() of the MaskedOptimizer, or lift its masks with set_masks({parameter: None, ...})"
        )
