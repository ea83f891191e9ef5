"""Warnings of a plan: policies on parameters that get no gradient."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from gradpolicy.errors import shortened
from gradpolicy.policies import Policy, Stop

Gradients = Mapping[str, Tensor | None]


def trained_in_vain(
    policies: Mapping[str, Policy], matched: Mapping[str, Iterable[str]], gradients: Gradients
) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each policy that get no gradient, or only zeros, even if they are active.

    Args:
        policies: The policies by name.
        matched: The names of the parameters that each matches, by the policy's name.
        gradients: The gradients by the parameters' names.
    """
    return {
        name: tuple(key for key in keys if not gets_gradient(gradients.get(key)))
        for name, keys in matched.items()
        # A stop is meant to give its parameters no gradient.
        if not isinstance(policies[name], Stop)
    }


def gets_gradient(gradient: Tensor | None) -> bool:
    """Return True if there is a gradient that is not zero in every entry."""
    return gradient is not None and (gradient.is_meta or bool(gradient.any()))


def vain_warnings(
    vain: Mapping[str, tuple[str, ...]], matched: Mapping[str, Collection[str]], gradients: Gradients
) -> Iterator[str]:
    """Yield a line for each policy on parameters that get no gradient."""
    for name, without in vain.items():
        count = len(matched[name])
        # No warning if the user has turned off the gradient of some of them.
        named = without if len(without) == count else [key for key in without if key in gradients]
        if not named:
            continue
        some = "none" if len(named) == count else f"{len(named)}"
        verb = "gets a gradient" if some == "none" else f"{'gets' if len(named) == 1 else 'get'} no gradient"
        zeros = any(gradients.get(key) is not None for key in named)
        why = (
            "a rounding or another step before the loss passes only zeros, unless a policy such as "
            "straight_through gives it a gradient"
            if zeros
            else "the loss does not depend on them, or a stop or detach lies in between"
        )
        yield f"{name}: {some} of its {count} parameters {verb} ({shortened(list(named))}): {why}"
