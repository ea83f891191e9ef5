"""MaskedOptimizer: any dense optimizer, with masks that say which entries train."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint, exact, moves, saving, together
from gradpolicy.optim.beginnings import is_torchs_own
from gradpolicy.optim.general import begin_momenta, needs_closure
from gradpolicy.optim.layout import check_mask, is_sharded, own_gradient
from gradpolicy.optim.options import checked
from gradpolicy.optim.parameter import FULL
from gradpolicy.optim.rehearsal import forget, is_rehearsal, rehearse
from gradpolicy.optim.state import bytes_of
from gradpolicy.optim.tracked import Tracked
from gradpolicy.optim.ways import Ways

_WRAPPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[MaskedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates only the entries that masks leave active.

    Frozen entries keep their value bit for bit, whatever the optimizer, the weight decay or the gradient.
    While every entry is active, the wrapped optimizer's own step runs, untouched.

    `torch.optim.Adam` and `AdamW` are exact for every entry: it moves as torch's own optimizer would move it
    if run on that entry alone, over its active steps.

    Any other optimizer steps as it is; afterwards frozen entries and their state are put back. There

    - a step count belongs to the whole tensor,
    - an entry whose state was emptied begins again as at the optimizer's first step: most state at 0, an
      anchor such as Prodigy's `p0` at the entry's present value,
    - "drop" frees memory only for tensors that are frozen as a whole.

    Args:
        inner: the optimizer to wrap. `param_groups`, `state` and `defaults` are its own.
        frozen_state: what becomes of an entry's moments and age while it is frozen. "keep": paused.
            "zero": 0 from when it freezes. "drop": as "zero", and no memory is held for them.
        bias_correction: "entry": by the entry's own age. "tensor": by the tensor's one step count, as torch
            does when moments are zeroed by hand; the count rests while the whole tensor is frozen.

    Raises:
        PolicyError: `inner` is no optimizer, or is wrapped already, or is DeepSpeed's; an option does not
            exist.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1), frozen_state="zero")
        >>> optimizer.set_mask(weight, torch.tensor([[True], [False]]))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()[1]
        tensor([1., 1.])
    """

    def __new__(cls, inner: Any = None, *settings: Any, **named: Any) -> MaskedOptimizer:
        """Makes the subclass that fits an optimizer whose state is spread over processes."""
        home = type(inner).__module__
        if cls is MaskedOptimizer and home.startswith(("torch.distributed.optim", "deepspeed")):
            from gradpolicy.distributed.zero import kind_for

            return super().__new__(kind_for(inner))
        return super().__new__(cls)

    def __init__(
        self, inner: torch.optim.Optimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        _check_inner(inner)
        self.inner = inner
        self._frozen_state = checked("frozen_state", frozen_state)
        self._bias_correction = checked("bias_correction", bias_correction)
        self._tracked: dict[Tensor, Tracked] = {}
        self._effective_steps = 0
        self._rehearsed: list[dict[str, Any]] | None = None
        for group in inner.param_groups:
            # A plain optimizer that has loaded a state_dict of this class keeps what it does not know.
            group.pop(checkpoint.KEY, None)
        self._set_up()

    def _set_up(self) -> None:
        """Do what `Optimizer.__init__` does, except for what is the wrapped optimizer's own."""
        _WRAPPERS[self.inner] = weakref.ref(self)
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        for hooks in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{hooks}_hooks", OrderedDict())
        self._patch_step_function()
        self._places: dict[int, tuple[int, int]] = {}
        self._exact = _is_adam(self.inner)
        self._update_exactly = exact.Updates()
        self._closure_needed = needs_closure(self.inner)
        # Some third-party optimizers, SAM for one, call the closure themselves, and more than once.
        self._closure_is_its_own = not is_torchs_own(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_frozen_state", "_bias_correction", "_tracked", "_effective_steps", "_rehearsed")
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
        """Add a group to the wrapped optimizer; its parameters start with every entry active."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as the wrapped optimizer does."""
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
        """Say which entries of a parameter train from the next step on.

        Args:
            parameter: one of the optimizer's parameters.
            mask: bool tensor that broadcasts to the parameter, True = trains; True or False for all of it;
                or a recipe with `materialize(shape, device)` and `state()`; None = all train.
            frozen_state: overrides the optimizer's for this parameter, from now on.
            bias_correction: overrides the optimizer's for this parameter, from now on.

        Raises:
            PolicyError: the parameter is not the optimizer's; the mask is not bool or does not fit; the
                optimizer was made with differentiable=True.
        """
        # Whatever the caller's mode, later steps write to what is made here.
        with torch.inference_mode(mode=False), torch.no_grad():
            tracked, fitting = self._ready(parameter, mask, frozen_state, bias_correction)
            tracked.set_mask(fitting)
        tracked.recipe = mask if hasattr(mask, "materialize") else None

    def set_masks(
        self,
        masks: Mapping[Tensor, Any],
        *,
        frozen_state: str | None = None,
        bias_correction: str | None = None,
    ) -> None:
        """Set the masks of many parameters, in less time than one after the other; others keep theirs.

        Args:
            masks: by parameter, what `set_mask` takes.
            frozen_state: overrides the optimizer's for these parameters, from now on.
            bias_correction: overrides the optimizer's for these parameters, from now on.

        Raises:
            PolicyError: as `set_mask`; masks before the one that is wrong are set.
        """
        several: list[tuple[Tracked, Tensor]] = []
        entries = 0
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                for parameter, mask in masks.items():
                    tracked, fitting = self._ready(parameter, mask, frozen_state, bias_correction)
                    tracked.recipe = mask if hasattr(mask, "materialize") else None
                    if fitting is None:
                        tracked.set_mask(None)
                        continue
                    several.append((tracked, fitting))
                    entries += fitting.numel()
                    if entries > together.AT_ONCE:
                        several, entries, ready = [], 0, several
                        together.set_masks(ready)
            finally:
                together.set_masks(several)

    def _ready(
        self, parameter: Tensor, mask: Any, frozen_state: str | None, bias_correction: str | None
    ) -> tuple[Tracked, Tensor | None]:
        """What is known of a parameter, with options taken, and a mask that fits it."""
        name = self._name(parameter)
        if hasattr(mask, "materialize"):
            mask = mask.materialize(parameter.shape, parameter.device)
        if mask is not None:
            mask = check_mask(mask, parameter, name)
        tracked = self._tracked.get(parameter) or self._track(parameter)
        if mask is not None and tracked.differentiable:
            raise PolicyError(f"{name}: an optimizer with differentiable=True cannot freeze entries")
        if frozen_state is not None:
            tracked.frozen_state = checked("frozen_state", frozen_state)
        if bias_correction is not None:
            tracked.bias_correction = checked("bias_correction", bias_correction)
        return tracked, mask

    def get_mask(self, parameter: Tensor) -> Tensor:
        """The parameter's mask as it was set (bool, broadcastable to it); all True where there is none."""
        self._name(parameter)
        tracked = self._tracked.get(parameter)
        if tracked is None:
            return torch.ones((), dtype=torch.bool, device=parameter.device).expand(parameter.shape)
        return tracked.mask()

    def age(self, parameter: Tensor) -> Tensor:
        """Updates of each entry since its moments were last empty: int64, broadcastable to the parameter."""
        self._name(parameter)
        return (self._tracked.get(parameter) or self._new_tracked(parameter)).ages()

    def active_share(self, parameter: Tensor | None = None) -> float:
        """The share of this process's entries that train: of one parameter, or of all."""
        if parameter is not None:
            self._name(parameter)
            parameters = [parameter]
        else:
            parameters = [p for group in self.param_groups for p in group["params"]]
        active = total = 0
        for each in parameters:
            tracked = self._tracked.get(each) or self._new_tracked(each)
            active, total = active + tracked.active_entries, total + tracked.layout.size
        return active / total if total else 1.0

    @property
    def effective_steps(self) -> int:
        """Updates that took place; a step that mixed precision skipped is not one."""
        return self._effective_steps

    @effective_steps.setter
    def effective_steps(self, steps: int) -> None:
        """Counts on from here, where an optimizer is wrapped in the middle of a training."""
        self._effective_steps = steps

    def state_bytes(self) -> int:
        """Bytes held on this process for the optimizer's state: moments, steps, masks and ages."""
        codes = [tensor for tracked in self._tracked.values() for tensor in tracked.cohorts.tensors]
        indices = [tracked.held.bytes for tracked in self._tracked.values() if tracked.held is not None]
        masks = sum(tensor.numel() * tensor.element_size() for tensor in codes) + sum(indices)
        return bytes_of(self.state) + masks

    def _track(self, parameter: Tensor) -> Tracked:
        tracked = self._tracked[parameter] = self._new_tracked(parameter)
        return tracked

    def _new_tracked(self, parameter: Tensor) -> Tracked:
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        tracked = Tracked(parameter, self.inner, self._exact, self.frozen_state, self.bias_correction)
        tracked.differentiable = bool(group.get("differentiable", False))
        return tracked

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
        """Zero gradients at frozen entries in place, NaN and infinity too; None for wholly frozen tensors.

        Call it before clipping, so that masked gradients do not count in the norm. `step` is right without.
        """
        vectors, copied = [], []
        for tracked in self._tracked.values():
            gradient = tracked.parameter.grad
            if gradient is None:
                continue
            if tracked.drops_gradient:
                tracked.parameter.grad = None
            elif tracked.kind is not FULL:
                if gradient.layout is not torch.strided:
                    self._refuse_sparse(tracked.parameter)
                tracked.follow()
                gradient = own_gradient(tracked.parameter, gradient)
                flat = tracked.layout.flat(gradient)
                vectors.append((flat, *tracked.active_flags()))
                copied.append((tracked.layout, flat, gradient))
        moves.clear_frozen(vectors)
        for layout, flat, gradient in copied:
            layout.write_back(flat, gradient)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active entries.

        Args:
            closure: reevaluates the model and returns the loss; it runs first, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            PolicyError: a gradient is sparse.
        """
        if self._closure_needed or (closure is not None and self._closure_is_its_own):
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
        """One update: the wrapped optimizer's own for what it can do, then the exact one for the rest."""
        ways = Ways(self.param_groups, self._tracked, closure is not None, self._refuse_sparse)
        if closure is None and is_rehearsal(self.inner):
            added = rehearse(self.inner, self._tracked.values())
            self._rehearsed = None if self._exact else added
            return None
        for tracked in ways.stepped:
            tracked.complete_state()
        stepped = self._tracked.values() if self._closure_needed else ways.stepped
        kept = [tracked for tracked in stepped if tracked.keeper is not None]
        result = None
        if closure is not None or ways.leaves_any or self._inner_is_heard():
            with ways.hidden_gradients(), self._scaling():
                result = self._step_and_restore(kept, closure)
        for tracked in ways.stepped:
            tracked.count_update()
        for tracked in ways.elsewhere:
            tracked.count_update_elsewhere()
        scale = getattr(self, "grad_scale", None)
        self._update_exactly(ways.exact, 1.0 if scale is None else float(scale))
        self._effective_steps += 1
        return result

    def _inner_is_heard(self) -> bool:
        """Whether a step of the wrapped optimizer that has no gradients is still one for somebody."""
        inner = self.inner
        hooks = (inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks)
        # Learning rate schedulers put theirs in the place of an optimizer's step.
        return not self._exact or any(hooks) or "step" in vars(inner)

    def _step_and_restore(self, kept: list[Tracked], closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step, without effect on frozen entries."""
        if self._rehearsed is not None:
            forget(self.inner, self._rehearsed, closure is not None)
            self._rehearsed = None
        for tracked in kept:
            tracked.save_frozen()
        if isinstance(self.inner, torch.optim.SGD):
            begin_momenta(self.inner, float(getattr(self, "grad_scale", None) or 1.0))
        result = self.inner.step(closure) if closure is not None else self.inner.step()
        for tracked in kept:
            tracked.restore_frozen()
        return result

    @contextmanager
    def _scaling(self) -> Iterator[None]:
        """Hand over what GradScaler told this optimizer."""
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
            if is_sharded(parameter) and parameter not in self._tracked:
                self._track(parameter)
        result = checkpoint.save(self.inner, self._tracked, self._effective_steps)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of the wrapped optimizer alone.

        Masks and ages become what was saved. Without saved ones, masks stay and every entry's age becomes its
        tensor's step count.

        Raises:
            PolicyError: a saved mask, its ages or Adam's moments do not fit their parameter, or there is no
                such parameter; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own, saved = checkpoint.split(state_dict)
        saved_ones = self._records_by_parameter(own, saved)
        self.inner.load_state_dict(own)
        for parameter, tracked in self._tracked.items():
            # Present masks must not touch state that comes with masks of its own.
            if parameter not in saved_ones:
                tracked.adopt_state()
        for parameter, record in saved_ones.items():
            tracked = self._tracked.get(parameter) or self._track(parameter)
            saving.restore(tracked, record, self._name(parameter))
        self._effective_steps = int(saved.get("effective_steps", self._effective_steps))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _records_by_parameter(
        self, own: dict[str, Any], saved: dict[str, Any]
    ) -> dict[Tensor, saving.Record]:
        """The records of a state_dict, when all of it is known to fit: a load that fails changes nothing."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found: dict[Tensor, saving.Record] = {}
        for index, record in saved.get("parameters", {}).items():
            place = int(index)
            if not 0 <= place < len(parameters):
                raise PolicyError(
                    f"the state_dict has a mask for parameter {place}; "
                    f"the wrapped optimizer has {len(parameters)}, counted from 0"
                )
            parameter = parameters[place]
            name = self._name(parameter)
            saving.check(record, parameter, name)
            if self._exact:
                saving.check_state(own["state"].get(place, {}), parameter, name)
            found[parameter] = record
        return found


def wrapper_of(optimizer: torch.optim.Optimizer) -> MaskedOptimizer | None:
    """The MaskedOptimizer that wraps an optimizer, where there is one."""
    present = _WRAPPERS.get(optimizer)
    return None if present is None else present()


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        raise PolicyError(f"inner: a torch.optim.Optimizer is needed, not {type(inner).__name__}")
    if isinstance(inner, MaskedOptimizer) or wrapper_of(inner) is not None:
        raise PolicyError(
            "inner: this optimizer is wrapped by a MaskedOptimizer already; set its masks there"
        )


def _is_adam(inner: torch.optim.Optimizer) -> bool:
    """Whether its step is torch's own Adam or AdamW."""
    own = inspect.unwrap(type(inner).step)
    return any(own is inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW))
