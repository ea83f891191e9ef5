"""Checks of arguments; each error names the argument."""

import inspect
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gradpolicy.errors import PolicyError, shown, unknown

# The upper limit of sizes and counts, which also fits 32-bit counters.
LARGEST_SIZE = 2**31 - 1
# NumPy's largest seed.
LARGEST_SEED = 2**32 - 1


# The choices for the optimizer state of frozen entries, and for the age in bias correction.
FROZEN_STATES = ("keep", "zero", "drop")
BIAS_CORRECTIONS = ("entry", "tensor")
BUFFERS = ("move", "eval")


def check_choice(key: str, value: object, valid: Iterable[str]) -> str:
    """Check that a value is one of several names, and return it.

    Raises:
        PolicyError: For anything else; it names the nearest valid name.
    """
    names = tuple(valid)
    if value not in names:
        raise unknown("value", str(value), names, key=key)
    return str(value)


def check_share(key: str, value: object) -> float:
    """Check that a value is a number between 0 and 1, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise PolicyError(f"{key}: expected a number between 0 and 1, got {shown(value)}")
    return float(value)


def check_number(key: str, value: object) -> float:
    """Check that a value is a finite number of at least 0, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PolicyError(f"{key}: expected a number of at least 0, got {shown(value)}")
    return float(value)


def check_flag(key: str, value: object) -> bool:
    """Check that a value is a bool, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if not isinstance(value, bool):
        raise PolicyError(f"{key}: expected True or False, got {shown(value)}")
    return value


def check_integer(key: str, value: object, *, least: int, most: int | None = None) -> int:
    """Check that a value is an integer within limits, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PolicyError(f"{key}: expected an integer of at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise PolicyError(f"{key}: expected at most {most}, got {shown(value)}")
    return value


def check_sizes(owner: str, **sizes: object) -> None:
    """Check integers of at least 1.

    Args:
        owner: The class that has these arguments.
        **sizes: The arguments by name.

    Raises:
        PolicyError: For the first that is not.
    """
    for name, value in sizes.items():
        check_integer(f"{owner}.{name}", value, least=1, most=LARGEST_SIZE)


def check_call(
    key: str, function: Callable[..., object], *values: object, takes: str, **named: object
) -> None:
    """Check that a function can be called with some arguments.

    Args:
        key: The function's name in the message.
        function: The function.
        *values: The positional arguments.
        takes: The arguments as the message describes them, such as ``"(step, epoch)"``.
        **named: The keyword arguments.

    Raises:
        PolicyError: If it cannot be called so.
    """
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        raise PolicyError(f"{key}: must take {takes}: {error}") from error
    except ValueError:
        pass  # written in C, without a signature


def check_free(key: str, path: Path, kind: str | None, is_own: Callable[[Path], bool]) -> None:
    """Check that writing a file does not replace a file of another kind.

    Args:
        key: The argument that names the file.
        path: The file.
        kind: The kind of file that may be replaced, such as ``"report"``; None: no file may.
        is_own: True if the existing file is of this kind.

    Raises:
        PolicyError: If there is another file.
    """
    if os.path.lexists(path) and not (path.is_file() and is_own(path)):
        other = f" and is no {kind}" if kind else ""
        raise PolicyError(f"{key}: {path} is there already{other}; it is kept, so name another file")
