"""Stops that leave nothing with a gradient."""

from collections.abc import Mapping

from gradpolicy.errors import PolicyError
from gradpolicy.flow.locations import place_of
from gradpolicy.policies import Policy, Stop


def is_cut(error: BaseException) -> bool:
    """Whether torch says that a loss has no graph to run backward through."""
    return "does not require grad and does not have a grad_fn" in str(error)


def check_cuts(policies: Mapping[str, Policy]) -> None:
    """Says, where no gradient came to anything that trains, which of the policies cut its way.

    Raises:
        PolicyError: If there is a ``Stop`` among them.
    """
    stops = [
        f"policy {name!r} (Stop at {place_of(policy)})"
        for name, policy in policies.items()
        if isinstance(policy, Stop)
    ]
    if stops:
        raise PolicyError(
            f"{' and '.join(stops)} {'cuts' if len(stops) == 1 else 'cut'} the only path of the gradient: "
            "nothing that trains gets one; cut elsewhere, or let something between the cut and the loss train"
        )
