"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint, restoring, state_probe
from gradpolicy.optim.entry_updates import EntryUpdates
from gradpolicy.optim.initial_state import is_torchs_own, needs_closure
from gradpolicy.optim.layout import fitting_mask
from gradpolicy.optim.mask_transition import Change, set_masks
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.options import checked
from gradpolicy.optim.state_bytes import bytes_of
from gradpolicy.optim.step_modes import StepModes
from gradpolicy.optim.update_rules import rule_for
from gradpolicy.optim.update_rules.sgd import begin_momenta
from gradpolicy.tensors.sharding import is_sharded

_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[MaskedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates only the entries that masks leave active.

    Frozen entries keep their value bit for bit, whatever the optimizer, the weight decay or the gradient.
    While every entry is active, the wrapped optimizer's own step runs, untouched.

    Adam, AdamW, SGD, RMSprop, Adagrad, NAdam, RAdam (torch's) and Lion (`pytorch_optimizer`'s) are exact for
    every entry: it moves as that optimizer would move it if run on that entry alone, over its active steps.
    `gradpolicy.update_rule` adds an optimizer of your own.

    Any other optimizer steps as it is; afterwards frozen entries and their state are put back. There

    - a step count belongs to the whole tensor,
    - an entry whose state was emptied begins again as at the optimizer's first step: most state at 0, an
      anchor such as Prodigy's `p0` at the entry's present value,
    - "drop" frees memory only for tensors that are frozen as a whole.

    A warning says, at the first mask on some entries, what that means for an optimizer that mixes entries
    (Muon, Adafactor, Shampoo, ...) or counts steps by tensor. Where state has no value for each entry (SOAP,
    8-bit state), only whole tensors freeze.

    Args:
        inner: the optimizer to wrap. `param_groups`, `state` and `defaults` are its own.
        frozen_state: what becomes of an entry's moments and age while it is frozen. "keep": paused.
            "zero": 0 from when it freezes. "drop": as "zero", and no memory is held for them.
        bias_correction: "entry": by the entry's own age. "tensor": by the tensor's one step count, as torch
            does when moments are zeroed by hand; the count rests while the whole tensor is frozen.

    Attributes:
        steps_inner: whether a step is being taken, which steps the wrapped optimizer too.

    Raises:
        PolicyError: `inner` is no optimizer, or is wrapped already, or is DeepSpeed's, Fabric's or
            accelerate's; an option does not exist. Later, if `inner.step` is called while entries are frozen.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1), frozen_state="zero")
        >>> optimizer.set_mask(weight, torch.tensor([[True], [False]]))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()[1]
        tensor([1., 1.])
    """

    _kinds: ClassVar[list[type[MaskedOptimizer]]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        """Notes a subclass: it is made for the optimizers that it says it wraps."""
        super().__init_subclass__(**options)
        MaskedOptimizer._kinds.append(cls)

    def __new__(cls, inner: Any = None, *options: Any, **named: Any) -> MaskedOptimizer:
        """Makes the subclass that is for this optimizer."""
        kinds = [kind for kind in MaskedOptimizer._kinds if kind.wraps(inner)]
        return super().__new__(kinds[0] if cls is MaskedOptimizer and kinds else cls)

    @classmethod
    def wraps(cls, optimizer: Any) -> bool:
        """Whether this subclass is the one for an optimizer."""
        return False

    def __init__(
        self, inner: torch.optim.Optimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        _check_inner(inner)
        self.inner = inner
        self._frozen_state = checked("frozen_state", frozen_state)
        self._bias_correction = checked("bias_correction", bias_correction)
        self._masked: dict[Tensor, MaskedParameter] = {}
        self._effective_steps = 0
        self._probed: list[dict[str, Any]] | None = None
        for group in inner.param_groups:
            # A plain optimizer that has loaded a state_dict of this class keeps what it does not know.
            group.pop(checkpoint.KEY, None)
        self._set_up()

    def _set_up(self) -> None:
        """Does what `Optimizer.__init__` does, except for what is the wrapped optimizer's own."""
        _WRAPPERS[self.inner] = weakref.ref(self)
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        for hooks in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self.steps_inner = False
        guard = self.inner.register_step_pre_hook(partial(_refuse_to_pass_masks, weakref.ref(self)))
        weakref.finalize(self, guard.remove)
        self._guard = guard.id
        self._places: dict[int, tuple[int, int]] = {}
        self._rule = rule_for(self.inner)
        self._update_entries = None if self._rule is None else EntryUpdates(self._rule)
        self._closure_needed = needs_closure(self.inner)
        # Some third-party optimizers, SAM for one, call the closure themselves, and more than once.
        self._calls_closure_itself = self._rule is None and not is_torchs_own(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_frozen_state", "_bias_correction", "_masked", "_effective_steps", "_probed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    @property
    def frozen_state(self) -> str:
        """What becomes of frozen entries' state, where `set_mask` does not say otherwise for a parameter."""
        return self._frozen_state

    @property
    def bias_correction(self) -> str:
        """Whose age counts in bias correction, where `set_mask` does not say otherwise for a parameter."""
        return self._bias_correction

    # --- what is shared with the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state; under "drop" moments are 1-D, of the active entries alone."""
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
        """Whether GradScaler hands its scale over instead of unscaling (fused optimizers)."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as the wrapped optimizer does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    # --- masks

    def set_mask(
        self,
        parameter: Tensor,
        mask: Any,
        *,
        frozen_state: str | None = None,
        bias_correction: str | None = None,
    ) -> None:
        """Says which entries of a parameter train from the next step on.

        Args:
            parameter: one of the optimizer's parameters.
            mask: bool tensor that broadcasts to the parameter, True = trains; True or False for all of it;
                or a seeded mask, which has `materialize(shape, device)`; None = all train.
            frozen_state: overrides the optimizer's for this parameter, from now on.
            bias_correction: overrides the optimizer's for this parameter, from now on.

        Raises:
            PolicyError: the parameter is not the optimizer's; the mask is not bool or does not fit; the
                optimizer was made with differentiable=True, or its state has no value for each entry.
        """
        self.set_masks({parameter: mask}, frozen_state=frozen_state, bias_correction=bias_correction)

    def set_masks(
        self,
        masks: Mapping[Tensor, Any],
        *,
        frozen_state: str | None = None,
        bias_correction: str | None = None,
    ) -> None:
        """Sets the masks of many parameters; others keep theirs.

        Args:
            masks: by parameter, what `set_mask` takes.
            frozen_state: overrides the optimizer's for these parameters, from now on.
            bias_correction: overrides the optimizer's for these parameters, from now on.

        Raises:
            PolicyError: as `set_mask`; masks before the one that is wrong are set.
        """
        # Whatever the caller's mode, later steps write to what is made here.
        with torch.inference_mode(mode=False), torch.no_grad():
            # One after the other: of seeded masks only one is in memory at a time.
            set_masks(self._ready(key, mask, frozen_state, bias_correction) for key, mask in masks.items())

    def _ready(
        self, parameter: Tensor, mask: Any, frozen_state: str | None, bias_correction: str | None
    ) -> Change:
        """What is known of a parameter, with options taken, and a mask that fits it."""
        name = self._name(parameter)
        if hasattr(mask, "materialize"):
            mask = mask.materialize(parameter.shape, parameter.device)
        if mask is not None:
            mask = fitting_mask(mask, parameter, name)
        masked = self._masked.get(parameter) or self._remember(parameter)
        if mask is not None and masked.differentiable:
            raise PolicyError(f"{name}: an optimizer with differentiable=True cannot freeze entries")
        if frozen_state is not None:
            masked.frozen_state = checked("frozen_state", frozen_state)
        if bias_correction is not None:
            masked.bias_correction = checked("bias_correction", bias_correction)
        return masked, mask

    def get_mask(self, parameter: Tensor) -> Tensor:
        """The parameter's mask as it was set (bool, broadcastable to it); all True where there is none."""
        self._name(parameter)
        return self._known(parameter).mask()

    def age(self, parameter: Tensor) -> Tensor:
        """Updates of each entry since its moments were last empty: int64, broadcastable to the parameter."""
        self._name(parameter)
        return self._known(parameter).age()

    def active_share(self, parameter: Tensor | None = None) -> float:
        """The share of this process's entries that train: of one parameter, or of all."""
        if parameter is not None:
            self._name(parameter)
            parameters = [parameter]
        else:
            parameters = [p for group in self.param_groups for p in group["params"]]
        known = [self._known(each) for each in parameters]
        total = sum(each.layout.size for each in known)
        return sum(each.active_entries for each in known) / total if total else 1.0

    @property
    def effective_steps(self) -> int:
        """Updates that took place; a step that mixed precision skipped is not one."""
        return self._effective_steps

    @effective_steps.setter
    def effective_steps(self, steps: int) -> None:
        """Counts on from here, where an optimizer is wrapped in the middle of a training."""
        self._effective_steps = steps

    @property
    def is_probed(self) -> bool:
        """Whether a step now is the one that only shows torch.distributed.checkpoint which state there is."""
        return state_probe.is_probe(self.inner)

    def state_bytes(self, parameter: Tensor | None = None) -> int:
        """Bytes held on this process for the state of one parameter, or of all.

        That is moments, steps, masks and ages.
        """
        if parameter is None:
            return bytes_of(self.state) + sum(masked.bytes for masked in self._masked.values())
        masked = self._masked.get(parameter)
        return bytes_of(self.state.get(parameter, {})) + (0 if masked is None else masked.bytes)

    def masked_parameters(self) -> Mapping[Tensor, MaskedParameter]:
        """What is known of each parameter that has, or once had, a mask."""
        return self._masked

    def _known(self, parameter: Tensor) -> MaskedParameter:
        """What is known of a parameter; made for the moment where it never had a mask."""
        return self._masked.get(parameter) or self._new(parameter)

    def _remember(self, parameter: Tensor) -> MaskedParameter:
        masked = self._masked[parameter] = self._new(parameter)
        return masked

    def _new(self, parameter: Tensor) -> MaskedParameter:
        place = self._place(parameter) or (0, 0)
        options = self.frozen_state, self.bias_correction
        masked = MaskedParameter(parameter, self.inner, self._rule, place, *options)
        masked.differentiable = bool(masked.group.get("differentiable", False))
        if self._was_only_probed(masked):
            masked.begin(0)
        return masked

    def _was_only_probed(self, masked: MaskedParameter) -> bool:
        """Return True if a probe made the state of a parameter, whose first update is still to come."""
        return self._probed is not None and not state_probe.has_begun(
            self.inner, masked.group, masked.parameter
        )

    def _name(self, parameter: Any) -> str:
        """What to call a parameter in messages.

        Raises:
            PolicyError: it is not the optimizer's.
        """
        place = self._place(parameter)
        if place is not None:
            index, position = place
            names = self.param_groups[index].get("param_names")
            return repr(names[position]) if names else f"parameter {position} of group {index}"
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else f" {parameter!r}"
        shapes = sorted({str(tuple(p.shape)) for group in self.param_groups for p in group["params"]})
        raise PolicyError(
            f"the parameter{shape} is not one of the wrapped optimizer's; "
            f"its parameters have the shapes {', '.join(shapes[:8])}{', ...' if len(shapes) > 8 else ''}"
        )

    def _place(self, parameter: Any) -> tuple[int, int] | None:
        """A parameter's group and position there: looked for where it was last, then everywhere."""
        groups = self.param_groups
        index, position = self._places.get(id(parameter), (0, 0))
        members = groups[index]["params"] if index < len(groups) else []
        if position < len(members) and members[position] is parameter:
            return index, position
        self._places = {
            id(known): (index, position)
            for index, group in enumerate(groups)
            for position, known in enumerate(group["params"])
        }
        return self._places.get(id(parameter))

    # --- steps

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Zeroes gradients at frozen entries in place, NaN and infinity too; None for wholly frozen tensors.

        Call it before clipping, so that masked gradients do not count in the norm. `step` is right without.
        """
        for masked in self._masked.values():
            gradient = masked.parameter.grad
            if gradient is None:
                continue
            if masked.drops_gradient:
                masked.parameter.grad = None
            else:
                self._mask(masked, gradient)

    @torch.no_grad()
    def mask_gradient(self, parameter: Tensor) -> None:
        """Zeroes the gradient of one parameter at frozen entries in place, NaN and infinity too."""
        masked, gradient = self._masked.get(parameter), parameter.grad
        if masked is None or gradient is None:
            return
        if masked.drops_gradient:
            gradient.zero_()
        else:
            self._mask(masked, gradient)

    def _mask(self, masked: MaskedParameter, gradient: Tensor) -> None:
        if not masked.is_full:
            if gradient.layout is not torch.strided:
                self._refuse_sparse(masked.parameter)
            masked.mask_gradient(gradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the active entries.

        Args:
            closure: reevaluates the model and returns the loss; it runs first, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            PolicyError: a gradient is sparse.
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
        """One update: the wrapped optimizer's own for what it can do, then the rule's for the rest."""
        modes = StepModes.of(self.param_groups, self._masked, closure is not None, self._refuse_sparse)
        if closure is None and self.is_probed:
            self._probed = state_probe.probe(self.inner, self._masked.values())
            return None
        stepped = self._masked.values() if self._closure_needed else modes.by_optimizer
        restored = [masked for masked in stepped if masked.copies is not None]
        result = None
        if closure is not None or modes.leaves_any or self._inner_is_heard():
            with modes.hidden_gradients(), self._scaling():
                result = self._step_and_restore(restored, closure)
        for masked in modes.by_optimizer:
            masked.count_update()
        for masked in modes.elsewhere:
            masked.count_update_elsewhere()
        if self._update_entries is not None:
            self._update_entries(modes.by_rule, self._scale)
        self._effective_steps += 1
        return result

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _inner_is_heard(self) -> bool:
        """Whether a step of the wrapped optimizer that has no gradients is still one for somebody."""
        inner = self.inner
        hooks = (inner._optimizer_step_pre_hooks.keys() - {self._guard}, inner._optimizer_step_post_hooks)
        # Learning rate schedulers put theirs in the place of an optimizer's step.
        return self._rule is None or any(hooks) or "step" in vars(inner)

    def _step_and_restore(
        self, restored: Sequence[MaskedParameter], closure: Callable[[], Any] | None
    ) -> Any:
        """The wrapped optimizer's step, without effect on frozen entries."""
        if self._probed is not None:
            state_probe.forget(self.inner, self._probed, closure is not None, self._masked)
            self._probed = None
        for masked in restored:
            restoring.save_frozen(masked)
        if isinstance(self.inner, torch.optim.SGD):
            begin_momenta(self.inner, self._scale)
        result = self.inner.step(closure) if closure is not None else self.inner.step()
        for masked in restored:
            restoring.restore_frozen(masked)
        return result

    @contextmanager
    def _scaling(self) -> Iterator[None]:
        """Hands over what GradScaler told this optimizer."""
        told = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        try:
            for name, value in told.items():
                setattr(self.inner, name, value)
            yield
        finally:
            for name in told:
                delattr(self.inner, name)

    def _refuse_sparse(self, parameter: Tensor) -> NoReturn:
        raise PolicyError(
            f"{self._name(parameter)} has a sparse gradient; MaskedOptimizer needs dense ones "
            "(for an embedding: sparse=False, and a mask of rows)"
        )

    # --- saving and loading

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own state_dict, and beside it masks and ages under "gradpolicy".

        Torch alone can load it: moments are dense, 0 where `drop` holds none.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if is_sharded(parameter) and parameter not in self._masked:
                self._remember(parameter)
        result = checkpoint.save(self.inner, self._masked, self._effective_steps)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this class or of the wrapped optimizer alone.

        Masks and ages become what was saved. Without saved ones, masks stay and every entry's age becomes its
        tensor's step count.

        Raises:
            PolicyError: a saved mask, its ages or state do not fit their parameter, or there is no such
                parameter; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own, saved = checkpoint.split(state_dict)
        records = self._fitting_records(own, saved)
        self.inner.load_state_dict(own)
        # Present masks must not touch state that comes with masks of its own.
        set_masks(
            (masked, masked.adopt_state(updates=0 if self._was_only_probed(masked) else None))
            for parameter, masked in self._masked.items()
            if parameter not in records
        )
        for parameter, record in records.items():
            self.restore(parameter, record)
        self._effective_steps = int(saved.get("effective_steps", self._effective_steps))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def restore(self, parameter: Tensor, record: checkpoint.Record) -> None:
        """Gives a parameter the mask and ages of a record that fits; its state is loaded already."""
        checkpoint.restore(self._masked.get(parameter) or self._remember(parameter), record)

    def _fitting_records(self, own: dict[str, Any], saved: dict[str, Any]) -> dict[Tensor, checkpoint.Record]:
        """The records of a state_dict, when all of it is known to fit: a load that fails changes nothing."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found: dict[Tensor, checkpoint.Record] = {}
        for index, record in saved.get("parameters", {}).items():
            if not 0 <= index < len(parameters):
                raise PolicyError(
                    f"the state_dict has a mask for parameter {index}; "
                    f"the wrapped optimizer has {len(parameters)}, counted from 0"
                )
            parameter = parameters[index]
            name = self._name(parameter)
            checkpoint.check(record, parameter, name)
            if self._rule is not None:
                checkpoint.check_state(own["state"].get(index, {}), self._rule.names, parameter, name)
            found[parameter] = record
        return found


def wrapper_of(optimizer: torch.optim.Optimizer) -> MaskedOptimizer | None:
    """The MaskedOptimizer that wraps an optimizer, where there is one."""
    present = _WRAPPERS.get(optimizer)
    return None if present is None else present()


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        raise PolicyError(f"inner: a torch.optim.Optimizer is needed, not {type(inner).__name__}")
    if type(inner).__module__.partition(".")[0] in ("accelerate", "lightning", "lightning_fabric"):
        raise PolicyError(
            f"inner: {type(inner).__name__} passes steps on to an optimizer of its own; wrap the torch "
            "optimizer first, and prepare or set up what MaskedOptimizer or gradpolicy.training gives"
        )
    if isinstance(inner, MaskedOptimizer) or wrapper_of(inner) is not None:
        raise PolicyError(
            "inner: this optimizer is wrapped by a MaskedOptimizer already; set its masks there"
        )


def _refuse_to_pass_masks(
    wrapper: weakref.ref[MaskedOptimizer], inner: torch.optim.Optimizer, *_: Any
) -> None:
    """Is called before each step of a wrapped optimizer.

    Raises:
        PolicyError: The step passes the wrapper by, and entries are frozen.
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
