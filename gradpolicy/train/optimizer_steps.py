"""Follows the steps of a run's optimizers, and saves the run's state with theirs."""

import io
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradpolicy.checks import LARGEST_SIZE, check_integer
from gradpolicy.errors import PolicyError, shortened
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.checkpoint_file import load_file
from gradpolicy.train.notices import Notices

STATE = "gradient_policies"
"""The key of the policies' state in the first param group of a saved optimizer."""


class Updates(Protocol):
    """The calls of a run.

    Attributes:
        updates: The number of updates so far.
        measures: True if the current update is measured.
        notices: The warnings of the run.
    """

    notices: Notices
    updates: int
    measures: bool

    def begin(self, *, late: bool = False) -> None:
        """Begin the update unless it has begun; ``late``: after its forward pass."""

    def gradients(self, optimizer: Any) -> None:
        """Show the unscaled gradients of an optimizer to sources."""

    def end(self) -> None:
        """End the update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, after which the update begins again."""


class Steps:
    """Tells a run of its optimizers' steps and gradients, by hooks on both.

    An update ends once each optimizer has stepped. The state of the run is in the first optimizer's
    ``state_dict``; an update begins again after it is loaded.

    Args:
        run: The run.
        optimizers: The optimizers.
        freezer: The freezer.
        guarded: The parameters that no other optimizer may update, by name.
        driven: False if the steps and gradients also begin updates, and show gradients to mask sources.

    Attributes:
        optimizers: The optimizers.
        masked: Those of them that have masks.
        partitioned: The partitioned optimizer of an engine, or none.
        wanted: The parameters whose full gradients sources need in this update.
        stepped: The optimizers that have stepped in the current update.
        hooks: Handles that are removed with the run.
    """

    def __init__(
        self,
        run: Updates,
        optimizers: Sequence[Any],
        freezer: Freezer,
        guarded: Mapping[str, Tensor],
        *,
        driven: bool = True,
    ) -> None:
        self._run, self.optimizers, self._driven = run, list(optimizers), driven
        self._freezer, self._guarded, self.masked = freezer, guarded, freezer.optimizers
        self.partitioned: list[Any] = [each for each in self.masked if each.is_partitioned]
        self.stepped: set[Any] = set()
        self.wanted: set[Tensor] = set()
        self._hooked: set[Tensor] = set()
        # The state of the run in a state_dict that an optimizer is loading.
        self._loaded: dict[Any, dict[str, Any]] = {}
        self._mode = ""
        self.hooks: list[Any] = []
        if guarded:
            self.hooks.append(register_optimizer_step_pre_hook(self._refuse_other_step))
        for each in self.optimizers:
            self.hooks.append(each.register_step_pre_hook(self._before_step))
            self.hooks.append(each.register_step_post_hook(self._after_step))
            saved = each.local if each in self.partitioned else each
            self.hooks.append(saved.register_load_state_dict_pre_hook(partial(self._before_load, each)))
            self.hooks.append(saved.register_load_state_dict_post_hook(partial(self._after_load, each)))
            # Not removed with the others: a state may be saved after the training.
            if (former := _SAVING.pop(saved, None)) is not None:
                former.remove()
            _SAVING[saved] = saved.register_state_dict_post_hook(partial(self._save, each))
        self.hook_gradients()
        for each in self.partitioned:
            each.hook_gradients()
            self.hooks.append(each)

    def hook_gradients(self) -> None:
        """Follow the gradients of freeze policies, also of parameters that were added later."""
        for name, parameter in self._freezer.parameters.items():
            if parameter not in self._hooked and parameter.requires_grad:
                self._hooked.add(parameter)
                owner = next(each for each in self.masked if parameter in set(parameters_of(each)))
                note = torch.compiler.disable(partial(self._take_gradient, name))
                mask = torch.compiler.disable(partial(self._mask_gradient, owner))
                self.hooks.append(parameter.register_hook(note))
                self.hooks.append(parameter.register_post_accumulate_grad_hook(mask))
        self.wanted = {self._freezer.parameters[name] for name in self._freezer.wanted_gradients()}

    def switch(self, mode: str) -> None:
        """Have schedule-free optimizers set the weights of ``"train"`` or ``"eval"``, unless they are set."""
        for each in self.optimizers if mode != self._mode and not self.partitioned else ():
            getattr(each, mode, bool)()
        self._mode = mode

    def remove(self) -> None:
        """Stop following."""
        while self.hooks:
            self.hooks.pop().remove()

    def end_if_stepped(self) -> None:
        """End an update in which not every optimizer steps."""
        if self.stepped:
            self._run.end()

    # ---- gradients and steps

    def _take_gradient(self, name: str, gradient: Tensor | None) -> None:
        if not self._driven:
            self._run.begin(late=True)
        self._run.notices.missing.note(name, gradient)

    def _mask_gradient(self, owner: MaskedOptimizer, parameter: Tensor) -> None:
        """Zero the frozen entries of a gradient, unless the run does or masks may change before the step."""
        may_change = self.stepped and not self._driven
        if parameter in self._freezer.dropped:
            parameter.grad = None
        elif not (self._run.measures or may_change or parameter in self.wanted):
            owner.mask_gradient(parameter)

    @torch.compiler.disable
    def _before_step(self, optimizer: Any, arguments: tuple, named: dict[str, Any]) -> Any:
        if self._driven:
            if optimizer in self.partitioned:
                self._run.gradients(optimizer)  # the engine clips them in its step
            return None
        if optimizer in self.stepped:
            self._run.end()  # it steps again before the others have
        (closure,) = (*arguments[1:], *named.values()) or (None,)
        self._run.begin(late=closure is None)
        if closure is None:
            self._run.gradients(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self._run.gradients(optimizer)
            return loss

        return arguments[:1], {"closure": observed}

    @torch.compiler.disable
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self.stepped:
            self._run.updates += 1  # under the masks of this batch
        self.stepped.add(optimizer)
        if len(self.stepped) == len(self.optimizers):
            self._run.end()

    def _refuse_other_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check, before a step of any optimizer, that it does not update masked parameters without masks.

        Raises:
            PolicyError: If it does.
        """
        if optimizer in self.optimizers or any(each.steps_inner for each in self.masked):
            return
        stepped = set(parameters_of(optimizer))
        if names := [name for name, parameter in self._guarded.items() if parameter in stepped]:
            raise PolicyError(
                f"{type(optimizer).__name__}.step would update {shortened(names)} past the policies: call "
                "step() of the optimizer that was wrapped for them (gradpolicy.training returns it), and do "
                "not create another one for these parameters while they train"
            )

    # ---- checkpoints

    def _save(self, optimizer: Any, _: Any, saved: dict[str, Any]) -> None:
        """Add the progress of an optimizer to its state_dict, and to the first one's the state of the run.

        It may go through ``torch.distributed.checkpoint``, which loads tensors only in the sizes
        that they have in the loading run, but bytes of any length.
        """
        state = {"stepped": optimizer in self.stepped, "updates": self._run.updates}
        if optimizer is self.optimizers[0]:
            state |= self._run.state_dict()
        torch.save(state, written := io.BytesIO())
        saved["param_groups"][0][STATE] = written.getvalue()

    def _before_load(self, optimizer: Any, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the state of the run out of a state_dict that an optimizer is about to load."""
        first, *others = state_dict["param_groups"]
        state = first.get(STATE, {})
        self._loaded[optimizer] = load_file(io.BytesIO(state)) if isinstance(state, bytes) else state
        first = {key: value for key, value in first.items() if key != STATE}
        return {**state_dict, "param_groups": [first, *others]}

    def _after_load(self, optimizer: Any, _: Any) -> None:
        state = self._loaded.pop(optimizer)
        updates = state.get("updates", getattr(optimizer, "effective_steps", 0))
        check_integer("the saved number of updates", updates, least=0, most=LARGEST_SIZE)
        (self.stepped.add if state.get("stepped") else self.stepped.discard)(optimizer)
        self._run.load_state_dict({"updates": updates, **state})


_SAVING: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""The hook by which each optimizer saves the state of its latest run."""


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
