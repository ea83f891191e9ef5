"""The two options of a masked parameter, and the values that each may have."""

from __future__ import annotations

from typing import Any

from gradpolicy.errors import PolicyError, nearest, shown

OPTIONS = {"frozen_state": ("keep", "zero", "drop"), "bias_correction": ("entry", "tensor")}


def checked(option: str, value: Any) -> str:
    """The value of an option.

    Raises:
        PolicyError: there is no such value.
    """
    if value not in OPTIONS[option]:
        raise PolicyError(f"{option}: {shown(value)} does not exist; {nearest(str(value), OPTIONS[option])}")
    return str(value)
