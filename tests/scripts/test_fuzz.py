"""The fuzzer finds no fault in two hundred cases, and takes every kind of fault for one."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import gradpolicy.launch.run as launch
from fuzzing.case import ACCEPT, EITHER, REFUSE, Case, Expectation, command
from fuzzing.dangers import FILES, RunsWhenRead
from fuzzing.judging import ACCEPTED, FAULT, REFUSED, judge
from fuzzing.running import run_case

PROGRAM = Path(__file__).parents[2] / "scripts" / "fuzz.py"
RIGHT = {"seed": 3, "plan_only": True}


@pytest.mark.slow
def test_two_hundred_cases_end_without_a_fault() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--cases=200"],
        capture_output=True,
        text=True,
        timeout=450,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]


# ---- what a program may do


def refuses(message: str = "error: seed: must be a whole number", code: int = 2) -> Callable:
    def program(arguments: Sequence[str]) -> int:
        print(message, file=sys.stderr)
        return code

    return program


def runs(config: dict) -> Callable:
    """A program that composes this config, whatever its arguments."""

    def program(arguments: Sequence[str]) -> int:
        launch.run(OmegaConf.create(config), [])
        return 0

    return program


def first(action: Callable[[], object], then: Callable | None = None) -> Callable:
    """A program that does something, hides it if it fails, and goes on as another one."""

    def program(arguments: Sequence[str]) -> int:
        try:
            action()
        except Exception:
            print("warning: not done")
        return (then or refuses())(arguments)

    return program


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Runs a case with a program; returns the result and the complaint."""
    monkeypatch.setattr(launch, "run", lambda config, overrides: None)

    def run(
        program: Callable,
        *overrides: str,
        expectation: Expectation = EITHER,
        limit: float = 60,
        **more: object,
    ) -> tuple[str, str]:
        arguments = command(*overrides, base=("plan_only=true",))
        case = Case("planted", arguments, expectation, files=FILES, **more)
        return judge(case, run_case(case, program, limit))

    return run


def test_what_is_accepted_or_refused_as_it_should_be_is_right(judged) -> None:
    assert judged(runs(RIGHT), "seed=3", expectation=ACCEPT) == (ACCEPTED, "")
    assert judged(refuses(), "seed=abc", expectation=REFUSE, names=("seed",)) == (REFUSED, "")
    assert judged(refuses("warning: passed over: old.ckpt\nerror: no checkpoint"))[0] == REFUSED
    # A sweep may leave its runs.
    leaves = first(lambda: Path("outputs").mkdir(), runs(RIGHT))
    assert judged(leaves, "-m", expectation=ACCEPT)[0] == ACCEPTED


def crashes(arguments: Sequence[str]) -> int:
    raise ValueError("seed")


def prints_a_traceback(arguments: Sequence[str]) -> int:
    print("Traceback (most recent call last):\n  …\nValueError: seed")
    return refuses()(arguments)


def is_killed(arguments: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


KEEP = Path("guarded/keep.txt")
FAULTS: dict[str, tuple[Callable, str]] = {
    "two lines": (refuses("error: seed\nmore of it"), "2 lines instead of one"),
    "an empty message": (refuses("error: "), "an empty message"),
    "a long line": (refuses(f"error: {'a' * 600}"), "a line of 607 characters"),
    "torch's advice": (refuses("error: load it with weights_only=False"), "weights_only"),
    "a stumble": (refuses("error: trainer: KeyError: 'loops'"), "stumbled"),
    "another key": (refuses("error: optimizer: is wrong"), "names none of 'seed'"),
    "an error": (crashes, "exit code 1"),
    "a traceback": (prints_a_traceback, "a traceback"),
    "a signal": (is_killed, "ended by signal 9"),
    "a folder": (first(lambda: Path("outputs").mkdir()), "left behind: outputs is new"),
    "a write": (first(lambda: KEEP.write_text("yours")), "left behind: guarded/keep.txt was changed"),
    "an import": (first(lambda: __import__("stranger")), "left behind: canary is new"),
    "no run": (lambda arguments: 0, "accepted, but nothing was run"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_another_end_than_one_clear_line_is_a_fault(judged, what: str) -> None:
    program, complaint = FAULTS[what]
    result, found = judged(program, "seed=abc", names=("seed",))
    assert result == FAULT
    assert complaint in found


def test_a_program_that_hangs_is_killed_and_a_fault(judged) -> None:
    result, complaint = judged(lambda arguments: time.sleep(600), limit=0.5)
    assert result == FAULT
    assert complaint.startswith("it hangs: killed after")


FORBIDDEN = {
    "os.system": lambda: os.system("touch canary"),
    "subprocess.Popen": lambda: subprocess.run(["touch", "canary"]),
    "os.system, unpickled": lambda: pickle.loads(pickle.dumps(RunsWhenRead())),
    "open": lambda: Path("/tmp/written by the fuzzer").write_text(""),
    "os.rename": lambda: os.rename("guarded", "/tmp/moved by the fuzzer"),
    "os.fork": lambda: [os.fork() or os._exit(0) for _ in range(20)],
}


@pytest.mark.parametrize("event", FORBIDDEN)
def test_what_no_input_may_do_is_prevented_and_a_fault(judged, event: str) -> None:
    result, complaint = judged(first(FORBIDDEN[event]))
    assert result == FAULT
    assert complaint.startswith(f"it did what no input may do: {event.partition(',')[0]}")
    assert not list(Path("/tmp").glob("* by the fuzzer"))


def test_a_result_that_was_not_expected_is_a_fault(judged) -> None:
    assert judged(runs(RIGHT), expectation=REFUSE) == (FAULT, "accepted, although it is wrong")
    refused = (FAULT, "refused, although there is nothing wrong with it")
    assert judged(refuses(), expectation=ACCEPT) == refused


def test_a_value_that_is_not_held_is_a_fault(judged) -> None:
    reference = {**RIGHT, "optimizer": {"lr": "${rate}"}, "rate": 0.5}
    assert judged(runs(reference), holds={"optimizer.lr": 0.5})[0] == ACCEPTED
    assert judged(runs(reference), holds={"optimizer.lr": 0.25})[0] == FAULT
    assert judged(runs(RIGHT), holds={"seed": 4}) == (FAULT, "accepted, but seed is 3 instead of 4")
    assert judged(runs(RIGHT), holds={"a.b": [1]}) == (FAULT, "accepted, but a.b is absent instead of [1]")


# ---- what is drawn
