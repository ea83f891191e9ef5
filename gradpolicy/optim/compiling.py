"""Runs functions of tensors, compiled by `torch.compile` where tensors are large."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradpolicy.errors import warn_user

COMPILE_FROM = 1 << 20
"""Entries of all tensors of a call from which a compiler is worth its time."""
BACKEND: Any = "inductor"
OPTIONS = {"realize_reads_threshold": 100, "realize_opcount_threshold": 400}
"""Else inductor stores moments in between, and a mask of rows is read by another loop, six times as slow."""
_log = logging.getLogger(__name__)
_said: set[str] = set()
_known: set[Any] = set()
"""The kinds of calls that have been compiled."""
Result = TypeVar("Result")


def compiles(entries: int) -> bool:
    """Return True if a call on so many entries is to be compiled."""
    return entries >= COMPILE_FROM and "eager" not in _said


def run_compiled(
    function: Callable[..., Result], kind: Hashable, arguments: Sequence[Any], otherwise: Callable[[], Result]
) -> Result:
    """Return the result of a compiled function or, if it cannot be compiled, of another.

    Args:
        function: A function of tensors; it must not look at their sizes.
        kind: What decides on a graph, such as dtypes.
        arguments: Its arguments.
        otherwise: Called if compiling fails, which a warning says once.
    """
    key = (function.__qualname__, kind)
    if "eager" in _said:
        return otherwise()
    try:
        return _compiled(function, key)(*arguments)
    except RuntimeError as error:
        if key in _known and "recompile" not in str(error):
            raise
        _say_eager(error)
    finally:
        _known.add(key)
    return otherwise()


def form(value: Any) -> Hashable:
    """Return what decides on a graph: of a tensor its dtype, and which dimensions have one entry."""
    return (value.dtype, *(size == 1 for size in value.shape)) if isinstance(value, Tensor) else value


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], kind: Hashable) -> Callable[..., Any]:
    """Return a function, compiled for tensors of any length."""
    if "compiled" not in _said:
        _said.add("compiled")
        _log.warning("torch.compile compiles the updates of masked entries, once, which takes a while")
    # Dynamo gives up after eight compilations of a code object, so each kind of call has its own.
    assert isinstance(function, FunctionType)
    copied = FunctionType(function.__code__.replace(), function.__globals__)
    options: Any = OPTIONS if BACKEND == "inductor" else None
    return torch.compile(copied, dynamic=True, fullgraph=True, backend=BACKEND, options=options)


def _say_eager(error: Exception) -> None:
    _said.add("eager")
    line = " ".join(str(error).split())[:200]
    warn_user(
        "masked entries are updated by uncompiled code, which takes several times as long, since "
        f"torch.compile failed: {line}"
    )
