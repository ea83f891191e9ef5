"""Checks of arguments; each names the argument that it refuses."""

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gradpolicy.errors import PolicyError, shown, unknown

# More of anything than this exceeds what memory holds, and what 32-bit counters count.
LARGEST_SIZE = 2**31 - 1
# NumPy takes no larger one.
LARGEST_SEED = 2**32 - 1


# What may become of the optimizer state of frozen entries, and whose age counts in bias correction.
FROZEN_STATES = ("keep", "zero", "drop")
BIAS_CORRECTIONS = ("entry", "tensor")


def check_choice(key: str, value: object, valid: Iterable[str]) -> str:
    """Return one of some names.

    Raises:
        PolicyError: For anything else; it names the nearest valid name.
    """
    names = tuple(valid)
    if value not in names:
        raise unknown("value", str(value), names, key=key)
    return str(value)


def check_share(key: str, value: object, *, whole: int = 1) -> float:
    """Return a number between 0 and 1, or 100 for percents.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= whole:
        raise PolicyError(f"{key}: must be a number between 0 and {whole}, got {shown(value)}")
    return float(value)


def check_flag(key: str, value: object) -> bool:
    """Return a flag.

    Raises:
        PolicyError: For anything else.
    """
    if not isinstance(value, bool):
        raise PolicyError(f"{key}: must be True or False, got {shown(value)}")
    return value


def check_whole(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return a whole number that is neither too small nor too large.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PolicyError(f"{key}: must be a whole number of at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise PolicyError(f"{key}: must be at most {most}, got {shown(value)}")
    return value


def check_sizes(owner: str, **sizes: object) -> None:
    """Check whole numbers of at least 1.

    Args:
        owner: The class whose arguments they are.
        **sizes: The arguments by name.

    Raises:
        PolicyError: For the first that is anything else.
    """
    for name, value in sizes.items():
        check_whole(f"{owner}.{name}", value, least=1, most=LARGEST_SIZE)


def check_call(
    key: str, function: Callable[..., object], *values: object, takes: str, **named: object
) -> None:
    """Check that a function can be called with some arguments.

    Args:
        key: What the function is called in the message.
        function: The function.
        *values: The positional arguments.
        takes: The arguments as the message describes them, such as ``"(step, epoch)"``.
        **named: The keyword arguments.

    Raises:
        PolicyError: If it takes others.
    """
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        raise PolicyError(f"{key}: must take {takes}: {error}") from error
    except ValueError:
        pass  # written in C, without a signature


def check_free(key: str, path: Path, kind: str | None, is_own: Callable[[Path], bool]) -> None:
    """Check that writing a file replaces nobody else's.

    Args:
        key: The argument that names the file.
        path: The file.
        kind: What this program writes there; None where it replaces nothing.
        is_own: Whether a file that is there is of this kind.

    Raises:
        PolicyError: If something else is there.
    """
    if os.path.lexists(path) and not (path.is_file() and is_own(path)):
        other = f" and is no {kind}" if kind else ""
        raise PolicyError(f"{key}: {path} is there already{other}; it is kept, so name another file")
