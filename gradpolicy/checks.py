"""Checks of arguments; each error names the argument."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gradpolicy.errors import PolicyError, shown, unknown

# The upper limit of sizes and counts, which also fits 32-bit counters.
LARGEST_SIZE = 2**31 - 1
# NumPy's largest seed.
LARGEST_SEED = 2**32 - 1


# The choices for the optimizer state of frozen entries, and for the age in bias correction.
FROZEN_STATES = ("keep", "zero", "drop")
BIAS_CORRECTIONS = ("entry", "tensor")
BUFFERS = ("move", "eval")


def check_choice(key: str, value: object, valid: Iterable[str], kind: str = "value") -> str:
    """Check that a value is one of several names, and return it; an error says what kind of name it is.

    Raises:
        PolicyError: For anything else; it names the nearest valid name.
    """
    names = tuple(valid)
    if value not in names:
        raise unknown(kind, str(value), names, key=key)
    return str(value)


def check_share(key: str, value: Any) -> float:
    """Check that a value is a number between 0 and 1, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if not (_is(value, Real) and 0.0 <= value <= 1.0):
        raise PolicyError(f"{key}: expected a number between 0 and 1, got {shown(value)}")
    return float(value)


def check_number(
    key: str, value: Any, *, least: float = 0.0, above: float | None = None, below: float = math.inf
) -> float:
    """Check that a value is a finite number within limits, and return it.

    Raises:
        PolicyError: For anything else.
    """
    low, high = -sys.float_info.max if above is None else above, min(below, sys.float_info.max)
    if not (_is(value, Real) and least <= value and low < value < high):
        wanted = "a finite number" if least == -math.inf else f"a number of at least {least:g}"
        wanted = wanted if above is None else f"a number above {above:g}"
        wanted += "" if below == math.inf else f" and below {below:g}"
        raise PolicyError(f"{key}: expected {wanted}, got {shown(value)}")
    return float(value)


def _is(value: Any, kind: type) -> Any:
    """Return True for a number of a kind, which a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_flag(key: str, value: object) -> bool:
    """Check that a value is a bool, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if not isinstance(value, bool):
        raise PolicyError(f"{key}: expected True or False, got {shown(value)}")
    return value


def check_integer(key: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    """Check that a value is an integer within limits, and return it.

    Raises:
        PolicyError: For anything else.
    """
    if not _is(value, Integral) or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise PolicyError(f"{key}: expected {wanted}, got {shown(value)}")
    if most is not None and value > most:
        raise PolicyError(f"{key}: expected at most {most}, got {shown(value)}")
    return int(value)


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


# The values of settings that mean the same in all optimizers. With eps=0 an entry whose gradients were all 0
# becomes 0 / 0.
_SETTINGS: Mapping[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("lr", "initial_lr", "rate", "weight_decay", "momentum"), check_number),
    **dict.fromkeys(
        ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize", "nesterov"), check_flag
    ),
    "betas": partial(check_number, below=1.0),
    "eps": partial(check_number, above=0.0),
}


def check_setting(name: str, value: Any, like: Any = None) -> None:
    """Check the value of a setting of an optimizer.

    Args:
        name: The setting.
        value: The value; it may be a tensor of one number.
        like: The value that the optimizer has, which is allowed; None: not known.

    Raises:
        PolicyError: If it is of another kind than that, or beyond the limits of the setting.
    """
    value, like = plain_number(value), plain_number(like)
    if like is not None and type(value) is type(like) and value == like:
        return
    if isinstance(like, tuple | list) and not (isinstance(value, tuple | list) and len(value) == len(like)):
        raise PolicyError(f"{name}: expected {len(like)} values such as {shown(like)}, got {shown(value)}")
    if isinstance(value, tuple | list) and isinstance(like, tuple | list | None):
        for each, one in zip(value, like or [None] * len(value), strict=True):
            check_setting(name, each, one)
    elif value is None and like is None and name in ("eps", "foreach", "fused"):
        pass  # the optimizer chooses
    elif name in _SETTINGS:
        _SETTINGS[name](name, value)
    elif isinstance(like, bool):
        check_flag(name, value)
    elif isinstance(value, float) or isinstance(like, Real):
        check_number(name, value, least=-math.inf)
    elif isinstance(like, str) and not isinstance(value, str):
        raise PolicyError(f"{name}: expected text such as {shown(like)}, got {shown(value)}")


def plain_number(value: Any) -> Any:
    """Return one number of torch or NumPy as Python's; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


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
