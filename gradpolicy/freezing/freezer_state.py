"""The state of freeze policies in a checkpoint."""

from collections.abc import Mapping
from typing import Any

from gradpolicy.errors import warn_user
from gradpolicy.freezing.bindings import Bindings


def state_of(bindings: Bindings) -> dict[str, Any]:
    """Return the state of the sources, and current masks that they cannot compute again.

    The combined masks and the ages are in the optimizer's own state_dict.
    """
    policies = bindings.policies.items()
    masks = {name: each.mask_state() for name, each in policies}
    return {
        "sources": {name: each.source.state_dict() for name, each in policies},
        "masks": {name: state for name, state in masks.items() if state is not None},
        "identities": {name: each.identity() for name, each in policies},
        "parameters": list(bindings.parameters),
    }


def load_state(bindings: Bindings, state: Mapping[str, Any]) -> set[str]:
    """Load the result of :func:`state_of`.

    Returns:
        The names of parameters that only policies of the saved run restricted.
    """
    saved, masks, identities = (state.get(key, {}) for key in ("sources", "masks", "identities"))
    for name, each in bindings.policies.items():
        own = each.identity()
        known = name in saved
        if known and identities.get(name, own) != own:
            warn_user(
                f"policy.{name}: was saved with another kind of mask source or other parameters; "
                "it is re-initialised"
            )
            known = False
        if known:
            each.source.load_state_dict(saved[name])
        with bindings.gathered():
            each.load_mask_state(masks.get(name) if known else None)
    return set(state.get("parameters", ())) - set(bindings.parameters)
