"""The one kind of error that wrong input gives, and the words that help to mend it."""

import difflib
from collections.abc import Iterable


class PolicyError(ValueError):
    """Wrong input: says which key or name, what is wrong with it, and the nearest valid names."""


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """Names the valid candidates that come closest to a name.

    Args:
        name: What the user wrote.
        candidates: The valid names.
        count: How many to name at most.

    Returns:
        A clause such as ``"did you mean 'guided', 'guided_relu'?"``; the valid names themselves where
        none is close and they are few; an empty string where there are no candidates.

    Example:
        >>> nearest("roud", ["round", "floor", "relu"], count=1)
        "did you mean 'round'?"
    """
    valid = sorted(set(candidates))
    by_lower = {candidate.lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.5)
    if close:
        return f"did you mean {_listed(by_lower[lower] for lower in close)}?"
    if not valid:
        return ""
    shown = valid if len(valid) <= 12 else valid[:12]
    return f"valid names: {_listed(shown)}{'' if len(shown) == len(valid) else ', …'}"


def unknown(kind: str, name: str, candidates: Iterable[str], key: str | None = None) -> PolicyError:
    """Builds the error for a name that does not exist.

    Args:
        kind: What the name was taken for, such as ``"rule"``.
        name: What the user wrote.
        candidates: The valid names.
        key: Where the user wrote it, such as ``"policy.trunk.params"``.
    """
    place = f"{key}: " if key else ""
    return PolicyError(f"{place}unknown {kind} {name!r}; {nearest(name, candidates)}".rstrip("; "))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
