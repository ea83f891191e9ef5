"""Settings of single parameters, such as a learning rate, during a step.

The param groups stay as the user made them: learning-rate schedulers, checkpoints and logs see no others.
During a step a group is split into one for each combination of settings among its parameters, so that the
optimizer does what it does with param groups made by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.optim.update_rules import Group

Settings = tuple[tuple[str, Any], ...]
"""The settings of a parameter: a factor on "lr", and values of the others."""
INITIAL, RATE = "initial_lr", "rate"
"""A rate that schedulers scale in place of the group's, and a rate that they do not scale."""


def as_settings(own: Mapping[str, Any], group: Group) -> Settings:
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


def check_settings(names: Iterable[str], group: Iterable[str]) -> None:
    """Check that a param group has all settings of these names.

    Raises:
        PolicyError: If it lacks one.
    """
    known = set(group) - {"params", "param_names"}
    for name in sorted(set(names) - known - {INITIAL, RATE}):
        raise unknown("setting of the optimizer", name, known)


def with_settings(group: Group, settings: Settings) -> Group:
    """Return the param group of parameters with these settings of their own."""
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


def places_of(parameters: Sequence[Tensor], of: Mapping[Tensor, Settings]) -> dict[Settings, list[int]]:
    """Return the indices of the parameters by their settings; those without settings have ()."""
    places: dict[Settings, list[int]] = {}
    for place, parameter in enumerate(parameters):
        places.setdefault(of.get(parameter, ()), []).append(place)
    return places


@contextmanager
def applied(optimizer: torch.optim.Optimizer, of: Mapping[Tensor, Settings]) -> Iterator[None]:
    """Give parameters settings of their own in the block, in which the optimizer steps.

    Args:
        optimizer: The optimizer.
        of: The settings by parameter; parameters of other optimizers are ignored.

    Raises:
        PolicyError: After a step in which the optimizer writes to its param groups, as schedule-free ones do.
    """
    groups = optimizer.param_groups
    before, stepped, split = list(groups), [], []
    for group in before:
        places = places_of(group["params"], of)
        if not any(places):
            stepped.append(group)
            continue
        for settings, indices in places.items():
            part = {**with_settings(group, settings)}
            for key in {"params", "param_names"} & part.keys():
                part[key] = [group[key][index] for index in indices]
            stepped.append(part)
            split.append((part, dict(part)))
    # The list itself changes: other optimizers may hold the same one, as the base optimizer of SAM does.
    groups[:] = stepped
    try:
        yield
    finally:
        groups[:] = before
    if any(after != given for after, given in split):
        raise PolicyError(
            f"{type(optimizer).__name__} keeps values of its own in its param groups, which would be lost "
            "where parameters have settings of their own; give it param groups made by hand"
        )
