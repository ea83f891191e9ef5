"""Arithmetic of the masks of several policies on one parameter."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.policies import Freeze, Train
from gradpolicy.tensors.mask import Mask, intersect, unite


def combine(masks: Iterable[tuple[Freeze, Mask]], parameter: Tensor) -> Mask:
    """Return the mask of a parameter under several active policies.

    Args:
        masks: The policies, each with its own mask of the parameter. The masks of ``Train`` policies are
            united, and the result is intersected with those of all others.
        parameter: The parameter.
    """
    shape, device = parameter.shape, parameter.device
    combined: Mask = True
    trained: Mask | None = None
    for policy, mask in masks:
        if isinstance(policy, Train):
            trained = mask if trained is None else unite(trained, mask, shape, device)
        else:
            combined = intersect(combined, mask, shape, device)
    return combined if trained is None else intersect(combined, trained, shape, device)


def frozen_together(frozen: Mapping[str, set[str]], policies: Mapping[str, Freeze]) -> dict[str, set[str]]:
    """Return what each policy freezes by name: ``Train`` policies freeze only what none of them trains."""
    trains = [frozen[name] for name, policy in policies.items() if isinstance(policy, Train)]
    return {
        name: names.intersection(*trains) if isinstance(policies[name], Train) else names
        for name, names in frozen.items()
    }


def check_same_options(name: str, policies: Mapping[str, Freeze]) -> None:
    """Check that the policies on a parameter require the same optimizer state.

    Raises:
        PolicyError: If they do not.
    """
    (first, one), *rest = policies.items()
    for other, another in rest:
        for key in ("frozen_state", "bias_correction"):
            here, there = getattr(one, key), getattr(another, key)
            if here != there:
                raise PolicyError(
                    f"{name!r}: policy.{first} wants {key}={here!r}, policy.{other} {key}={there!r};"
                    f" policies on one parameter must agree: give both the same {key}, or different params"
                )
