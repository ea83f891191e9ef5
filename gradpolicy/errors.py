"""Errors for invalid input and failed runs, and suggestions for their messages."""

import difflib
import inspect
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PACKAGE = str(Path(__file__).parent)


class PolicyError(ValueError):
    """Raised for invalid input. The message has the key, the cause and the nearest valid names."""

    exit_code = 2


class PromiseError(PolicyError):
    """Raised if a guarantee of this package is violated, such as by a frozen entry that changed."""

    exit_code = 3


@contextmanager
def under(key: str) -> Iterator[None]:
    """Prefix the message of a PolicyError in the block by a key.

    Example:
        >>> with under("policy.trunk.params"):
        ...     raise PolicyError("matches nothing")
        Traceback (most recent call last):
        gradpolicy.errors.PolicyError: policy.trunk.params: matches nothing
    """
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{key}: {error}") from error


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """Return a clause with the valid names that are closest to a name.

    Args:
        name: What the user wrote.
        candidates: The valid names.
        count: The maximum number of names.

    Returns:
        A clause such as ``"did you mean 'guided', 'guided_relu'?"``; a list of the valid names if none is
        close and there are few; an empty string if there are no candidates.

    Example:
        >>> nearest("roud", ["round", "floor", "relu"], count=1)
        "did you mean 'round'?"
    """
    valid = sorted(set(candidates))
    # Of `Random` and its module `random`, the class.
    by_lower = {candidate.lower(): candidate for candidate in reversed(valid)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.5)
    if close:
        return f"did you mean {_listed(by_lower[lower] for lower in close)}?"
    if not valid:
        return ""
    # Of the parts of a model, the outer ones.
    shown = valid if len(valid) <= 12 else sorted(valid, key=lambda name: name.count("."))[:12]
    return f"valid names: {_listed(shown)}{'' if len(shown) == len(valid) else ', …'}"


def unknown(kind: str, name: str, candidates: Iterable[str], key: str | None = None) -> PolicyError:
    """Return the error for an unknown name.

    Args:
        kind: What the name should be, such as ``"rule"``.
        name: What the user wrote.
        candidates: The valid names.
        key: The key with this name, such as ``"policy.trunk.params"``.
    """
    prefix = f"{key}: " if key else ""
    return PolicyError(f"{prefix}unknown {kind} {shown(name)}; {nearest(name, candidates)}".rstrip("; "))


def shown(value: object) -> str:
    """Return the repr of a value for an error message: on one line, shortened if it is long.

    Example:
        >>> shown("abc"), shown([1, 2]), len(shown("a" * 5000))
        ("'abc'", '[1, 2]', 80)
    """
    return brief(repr(value))


def brief(text: str, most: int = 80) -> str:
    """Return a text on one line, shortened if it is long.

    Example:
        >>> brief("one two three", most=8), brief("one two")
        ('one two…', 'one two')
    """
    line = " ".join(part.strip() for part in text[: 2 * most].splitlines())
    return line if len(text) <= most and len(line) <= most else f"{line[: most - 1]}…"


def warn_user(message: str) -> None:
    """Give a warning whose location is the nearest caller outside of this package."""
    files = [frame.filename for frame in reversed(traceback.extract_stack())]
    level = next((depth for depth, file in enumerate(files, 1) if not file.startswith(_PACKAGE)), 1)
    warnings.warn(message, stacklevel=level)


def check_named(policies: object) -> None:
    """Check that policies are given as a dict.

    Raises:
        PolicyError: If they are not.
    """
    if not isinstance(policies, Mapping):
        raise PolicyError(f"policies: expected a dict from names to policies, got {type(policies).__name__}")


class KnowsItsArguments:
    """Base class whose error for an unknown argument suggests the nearest names.

    Raises:
        PolicyError: In place of Python's ``TypeError``.

    Example:
        >>> class Half(KnowsItsArguments):
        ...     def __init__(self, of: int) -> None: ...
        >>> Half(off=2)
        Traceback (most recent call last):
        gradpolicy.errors.PolicyError: Half: takes no argument 'off'; did you mean 'of'?
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Check the arguments before the constructor gets them."""
        refuse_unknown_arguments(cls, named)
        return super().__new__(cls)


def refuse_unknown_arguments(kind: type, names: Iterable[str]) -> None:
    """Refuse arguments that neither a class nor its base classes take.

    Args:
        kind: The class.
        names: The names of the arguments that it was given.

    Raises:
        PolicyError: At the first that is unknown.
    """
    known = known_arguments(kind)
    for name in names:
        if name not in known:
            raise PolicyError(f"{kind.__name__}: takes no argument {shown(name)}; {nearest(name, known)}")


def known_arguments(kind: type) -> list[str]:
    """Return the arguments that a class and the base classes take to which it passes further ones."""
    known: list[str] = []
    for constructor in (vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base)):
        parameters = inspect.signature(constructor).parameters.values()
        known += [each.name for each in parameters if each.kind in NAMED and each.name != "self"]
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    return known


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and the number of the others.

    Example:
        >>> shortened(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(shown, names))
