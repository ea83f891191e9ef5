"""Loops in Python that numba compiles, in place of the C sources where there is no compiler.

numba is imported when such a loop is first wanted, and never a condition for running.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch


@functools.cache
def hindrance() -> str | None:
    """Why numba cannot be had; None where it can."""
    try:
        importlib.import_module("numba")
    except (ImportError, OSError, RuntimeError, SystemError) as error:
        return str(error)
    # At level DEBUG it writes thousands of lines a loop, which takes longer than to compile it.
    logger = logging.getLogger("numba")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    return None


@functools.cache
def loops(module: str) -> Any:
    """A module of loops; None where numba cannot be had."""
    return None if hindrance() else importlib.import_module(module)


def loop(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, to run without the GIL; kept on disk where it may be."""
    from numba import njit

    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return njit(nogil=True, error_model="numpy")(function)


def parts(loop: Callable[..., Any], *arguments: Any, size: int, part: int) -> Iterator[Callable[[], Any]]:
    """A loop's calls; its last arguments are the first of `size` items to do and the one after the last."""
    for start in range(0, size, part):
        yield partial(loop, *arguments, start, min(start + part, size))


def in_parallel(tasks: Sequence[Callable[[], object]]) -> None:
    """Run tasks that release the GIL, on as many threads as torch has."""
    queue, threads = iter(tasks), min(len(tasks), torch.get_num_threads())

    def work() -> None:
        for task in queue:
            task()

    helpers = [_pool(threads, os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


@functools.cache
def _pool(threads: int, _process: int) -> ThreadPoolExecutor:
    """Threads of this very process: one that was forked has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="gradpolicy")
