"""The optimizer that a MaskedOptimizer wraps: its param groups, and settings of single parameters.

The param groups stay as the user made them: learning-rate schedulers, checkpoints and logs see no others.
During a step a group is split into one for each combination of settings among its parameters, so that the
optimizer does what it does with param groups made by hand.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_setting
from gradpolicy.errors import PolicyError, shown, under, unknown
from gradpolicy.optim.optimizers import Optimizers
from gradpolicy.optim.update_rules import Group, UpdateRule, is_torchs_own, rule_for
from gradpolicy.optim.update_rules.master_weights import MasterWeights

Settings = tuple[tuple[str, Any], ...]
"""The settings of a parameter: a factor on "lr", and values of the others."""
INITIAL, RATE = "initial_lr", "rate"
"""A rate that schedulers scale in place of the group's, and a rate that they do not scale."""
_LISTS = {"params", "param_names"}
"""What a param group has for each of its parameters."""


class Wrapped:
    """A wrapped optimizer, and the one place where the group of a parameter is looked up.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: As given.
        parts: The optimizers that it consists of, or it alone.
        rule: How it moves one entry; None where no update rule describes it.
        settings: Settings of single parameters, which replace those of their param groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        joined = optimizer.optimizers if isinstance(optimizer, Optimizers) else []
        self.parts = [Wrapped(each) for each in joined] or [self]
        self.rule = rule_for(optimizer)
        self.settings: dict[Tensor, Settings] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._masters: dict[torch.dtype, UpdateRule] = {}

    @functools.cached_property
    def needs_closure(self) -> bool:
        """True if a step needs a closure. Such optimizers also move tensors that have no gradient."""
        step = inspect.unwrap(type(self.optimizer).step)
        closure = inspect.signature(step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    @functools.cached_property
    def calls_closure(self) -> bool:
        """True if a step must call the closure itself, perhaps more than once, as SAM does."""
        known = self.rule is not None or isinstance(self.optimizer, Optimizers)
        return self.needs_closure or not (known or is_torchs_own(self.optimizer))

    def begin_state(self) -> None:
        """Give each parameter a state, empty until its first update.

        Without any, torch.distributed.checkpoint would take a first step to create it.
        """
        for part in self.parts:
            # Adagrad creates state itself, and cannot be copied with an empty one.
            for parameter in () if isinstance(part.optimizer, torch.optim.Adagrad) else part.parameters():
                self.optimizer.state.setdefault(parameter, {})

    # --- parameters

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def part_of(self, parameter: Tensor) -> Wrapped:
        """Return the part that has a parameter.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        self._place_of(parameter)
        return next(part for part in self.parts if part._find(parameter) is not None)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter; empty before its first update."""
        return self.optimizer.state.get(parameter, {})

    def group_of(self, parameter: Tensor) -> Group:
        """Return the param group of a parameter, with its own settings in it.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        group = self.optimizer.param_groups[self._place_of(parameter)[0]]
        return with_settings(group, self.settings.get(parameter, ()))

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter for messages.

        Raises:
            PolicyError: If it is not the optimizer's.
        """
        index, position = self._place_of(parameter)
        names = self.optimizer.param_groups[index].get("param_names")
        return repr(names[position]) if names else f"parameter {position} of group {index}"

    def _place_of(self, parameter: Any) -> tuple[int, int]:
        """Return the index of a parameter's group, and its position there."""
        if (found := self._find(parameter)) is not None:
            return found
        shape = f" of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else f" {parameter!r}"
        shapes = sorted({str(tuple(known.shape)) for known in self.parameters()})
        raise PolicyError(
            f"the parameter{shape} is not one of the wrapped optimizer's; "
            f"its parameters have the shapes {', '.join(shapes[:8])}{', ...' if len(shapes) > 8 else ''}"
        )

    def _find(self, parameter: Any) -> tuple[int, int] | None:
        """Return the same, None for a parameter of others; groups may have changed since the last call."""
        groups = self.optimizer.param_groups
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

    def master_rule(self, parameter: Tensor) -> UpdateRule:
        """Return the rule that moves a parameter of 16 bits as float32.

        Raises:
            PolicyError: If there is none.
        """
        if self.rule is None or self.rule.counts_in_group:
            raise PolicyError(
                f"{self.name_of(parameter)}: master_weights=True expects an optimizer with an update rule, "
                f"such as AdamW or SGD, got {type(self.optimizer).__name__}"
            )
        dtype = parameter.dtype
        return self._masters.setdefault(dtype, MasterWeights(self.rule, dtype))

    # --- a step with other groups

    def set_settings(self, settings: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Give parameters settings of their own; see `MaskedOptimizer.set_settings`."""
        if not isinstance(settings, Mapping) or not all(
            isinstance(own, Mapping) for own in settings.values()
        ):
            raise PolicyError(
                f"set_settings: expected a dict from parameters to dicts of settings, got {shown(settings)}"
            )
        for part in self.parts:
            own = {
                p: group for group in part.optimizer.param_groups for p in group["params"] if p in settings
            }
            for parameter, group in own.items():
                check_settings(settings[parameter], group)
                with under(self.name_of(parameter)):
                    for name, value in settings[parameter].items():
                        check_setting(name, value, None if name == "lr" else group.get(name))
            if own and isinstance(part.optimizer, torch.optim.LBFGS | torch.optim.Rprop):
                kind = type(part.optimizer).__name__
                raise PolicyError(
                    f"{kind} cannot give parameters rates of their own; use another, such as AdamW"
                )
            part.settings = {p: _as_settings(settings[p], group) for p, group in own.items()}

    def groups(self, only: Tensor | None = None) -> Iterator[tuple[Group, list[Tensor]]]:
        """Yield the settings and the parameters of each group of a step; of only one, if given."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for settings, places in part._by_settings(group, only).items():
                    members = [group["params"][place] for place in places]
                    yield with_settings(group, settings), members

    def _by_settings(self, group: Group, only: Tensor | None) -> dict[Settings, list[int]]:
        """Return the positions of a group's parameters, or of only one, by their settings."""
        chosen: Sequence[int] = range(len(group["params"]))
        if only is not None:
            index, position = self._find(only) or (None, 0)
            chosen = [position] if index is not None and self.optimizer.param_groups[index] is group else []
        if not self.settings:
            return {(): list(chosen)} if chosen else {}
        places: dict[Settings, list[int]] = {}
        for place in chosen:
            places.setdefault(self.settings.get(group["params"][place], ()), []).append(place)
        return places

    @contextmanager
    def stepping(self, only: Tensor | None = None) -> Iterator[None]:
        """Have the optimizer step, in the block, with a param group for each combination of settings.

        Args:
            only: The one parameter that is stepped; None: all.

        Raises:
            PolicyError: After a step in which the optimizer writes to its param groups, as schedule-free ones
                do, while parameters have settings of their own.
        """
        if not self.settings and only is None:
            yield
            return
        groups, split = self.optimizer.param_groups, []
        before = [(group, {key: group[key] for key in group.keys() & _LISTS}) for group in groups]
        chosen = [self._by_settings(group, only) for group in groups]
        stepped: list[Group] = []
        for (group, lists), by_settings in zip(before, chosen, strict=True):
            for settings, places in by_settings.items():
                part = with_settings(group, settings)
                part.update({key: [values[place] for place in places] for key, values in lists.items()})
                stepped.append(part)
                split += [(part, dict(part))] if settings else []
        # The list itself changes: other optimizers may hold the same one, as the base optimizer of SAM does.
        groups[:] = stepped
        try:
            yield
        finally:
            groups[:] = [group for group, _ in before]
            for group, lists in before:
                group.update(lists)
        if any(after != given for after, given in split):
            raise PolicyError(
                f"{type(self.optimizer).__name__} keeps values of its own in its param groups, which would "
                "be lost where parameters have settings of their own; give it param groups made by hand"
            )


def check_settings(names: Iterable[str], group: Iterable[str]) -> None:
    """Check that a param group has all settings of these names.

    Raises:
        PolicyError: If it lacks one.
    """
    known = set(group) - _LISTS
    for name in sorted(set(names) - known - {INITIAL, RATE}):
        raise unknown("setting of the optimizer", name, known)


def _as_settings(own: Mapping[str, Any], group: Group) -> Settings:
    """Return settings in a comparable form, with a factor on "lr" instead of an initial rate.

    The group's initial rate is stored in it, as schedulers do, for a run that resumes.

    Raises:
        PolicyError: If the group's initial rate is 0.
    """
    if INITIAL in own:
        rest = {name: value for name, value in own.items() if name != INITIAL}
        begun = group[INITIAL] = float(group[INITIAL if INITIAL in group else "lr"])
        if begun == 0.0:
            raise PolicyError("lr: the optimizer's own is 0, which schedulers cannot scale; give it another")
        own = {**rest, "lr": rest.get("lr", 1.0) * own[INITIAL] / begun}
    return tuple(sorted(own.items()))


def with_settings(group: Group, settings: Settings) -> Group:
    """Return the param group of parameters with these settings of their own; without any the group itself."""
    if not settings:
        return group
    given = dict(settings)
    factor = given.pop("lr", None)
    own = {**group, **given}
    if RATE in own:
        own["lr"] = own.pop(RATE)
    if factor is not None:
        own["lr"] = own["lr"] * factor
    return own
