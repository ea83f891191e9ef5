"""Policies that cannot both hold at one place."""

import itertools
from collections.abc import Mapping

from gradpolicy.errors import PolicyError
from gradpolicy.flow.locations import Places
from gradpolicy.policies import FlowPolicy, Stop
from gradpolicy.when import When


def check_operations(policies: Mapping[str, FlowPolicy], places: Mapping[str, Places]) -> None:
    """Refuses two rules for one operation in one module.

    Raises:
        PolicyError: Naming both policies, the operation and the module.
    """
    for first, second in _pairs_that_meet(policies):
        shared = [op for op in places[first].operations if op in places[second].operations]
        if shared and places[first].within & places[second].within:
            raise PolicyError(
                f"policies {first!r} and {second!r} both have a rule for operation {shared[0].name!r} "
                f"in {_shared_module(places[first], places[second])}"
            )


def check_boundaries(policies: Mapping[str, FlowPolicy], places: Mapping[str, Places]) -> None:
    """Refuses at one side of a module: a stop beside another policy, or one kind twice.

    Raises:
        PolicyError: Naming both policies and the place.
    """
    for first, second in _pairs_that_meet(policies):
        one, other = places[first], places[second]
        if not one.side or one.side != other.side or not one.at & other.at:
            continue
        name = next(name for name, module in one.matched.items() if id(module) in other.at)
        _check_pair(policies, first, second, f"the {one.side} of module {name!r}")


def check_parameters(policies: Mapping[str, FlowPolicy], places: Mapping[str, Places]) -> None:
    """Refuses on one parameter: a stop beside another policy, or one kind twice.

    Raises:
        PolicyError: Naming both policies and the parameter.
    """
    for first, second in _pairs_that_meet(policies):
        shared = [name for name in places[first].parameters if name in places[second].parameters]
        if shared:
            _check_pair(policies, first, second, f"parameter {shared[0]!r}")


def _check_pair(policies: Mapping[str, FlowPolicy], first: str, second: str, place: str) -> None:
    one, other = policies[first], policies[second]
    if _kind(one) == _kind(other):
        raise PolicyError(f"policies {first!r} and {second!r} do the same at {place}: {type(one).__name__}")
    if isinstance(one, Stop) or isinstance(other, Stop):
        stop, idle = (first, second) if isinstance(one, Stop) else (second, first)
        raise PolicyError(
            f"policies {first!r} and {second!r} contradict each other at {place}: "
            f"{stop!r} stops the gradient that {idle!r} is to change"
        )


def _shared_module(one: Places, other: Places) -> str:
    """The outermost module in which both hold."""
    for first, second in ((one, other), (other, one)):
        for name, module in first.matched.items():
            if id(module) in second.within:
                return f"module {name!r}" if name else "the model"
    return "modules below both"


def _kind(policy: FlowPolicy) -> tuple[type, str]:
    return type(policy), policy.rule.name


def _pairs_that_meet(policies: Mapping[str, FlowPolicy]) -> list[tuple[str, str]]:
    """Pairs of policies that can hold at one time."""
    return [
        (first, second)
        for first, second in itertools.combinations(policies, 2)
        if _can_meet(policies[first].when, policies[second].when)
    ]


def _can_meet(one: When, other: When) -> bool:
    shared = set(one.phases) & set(other.phases)
    if not shared:
        return False
    if shared != {"fit"} or one.unit != other.unit:
        return True
    return (one.stop is None or other.start < one.stop) and (other.stop is None or one.start < other.stop)
