"""Loops that numba compiles: imported when they are wanted, never a condition for running."""

import logging
import subprocess
import sys
import threading

import pytest
import torch

from gradpolicy.machinery import jitting


def test_numba_is_imported_with_the_first_loop_alone() -> None:
    program = (
        "import sys, gradpolicy.optim, gradpolicy.masks; from gradpolicy.machinery import jitting;"
        "assert 'numba' not in sys.modules; assert jitting.loops('gradpolicy.optim.jitted.loops');"
        "assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_where_numba_cannot_be_had_there_are_no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (jitting.hindrance, jitting.loops):
        monkeypatch.setattr(jitting, cached.__name__, cached.__wrapped__)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba" in (jitting.hindrance() or "")
    assert jitting.loops("gradpolicy.optim.jitted.loops") is None


def test_a_loop_is_compiled_where_no_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])

    @jitting.loop
    def twice(number):  # type: ignore[no-untyped-def]
        return 2 * number

    assert twice(21) == 42


@pytest.mark.parametrize("threads", [1, 3])
def test_every_task_runs_once_on_as_many_threads_as_torch_has(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together, met = threading.Barrier(threads, timeout=30), []

    def task(number: int) -> None:
        together.wait()  # all threads are needed to get past it
        met.append((number, threading.get_ident()))

    jitting.in_parallel([lambda number=number: task(number) for number in range(6)])
    assert sorted(number for number, _ in met) == list(range(6))
    assert len({thread for _, thread in met}) == threads


def test_an_error_in_a_task_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        jitting.in_parallel([lambda: 1 // 0] * 4)


def test_a_log_at_level_debug_is_not_filled_by_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert jitting.hindrance() is None
    assert not logging.getLogger("numba.core.ssa").isEnabledFor(logging.DEBUG)
    assert logging.getLogger("gradpolicy").isEnabledFor(logging.DEBUG)
