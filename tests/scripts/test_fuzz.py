"""The fuzzer finds no fault in two hundred cases, and takes every kind of fault for one."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzzing.files import EVIL
from fuzzing.running import ACCEPTED, FAULT, REFUSED, Case, run_case
from gradpolicy.errors import PolicyError

PROGRAM = Path(__file__).parents[2] / "scripts" / "fuzz.py"


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


def refuse(message: str = "density: must be a number") -> None:
    raise PolicyError(message)


def copy() -> None:
    Path("out/a").write_text(Path("b").read_text())


def test_accepted_or_refused_in_one_line_is_right() -> None:
    assert run_case(Case("copies", copy, ACCEPTED, {"b": b""})) == (ACCEPTED, "")
    assert run_case(Case("refuses", refuse, REFUSED)) == (REFUSED, "")


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "two lines": (lambda: refuse("one\ntwo"), "not one line"),
    "an empty message": (lambda: refuse(" "), "not one line"),
    "a long line": (lambda: refuse("a" * 600), "not one line"),
    "torch's advice": (lambda: refuse("load it with weights_only=False"), "stumbled"),
    "a stumble": (lambda: refuse("KeyError: 'loops'"), "stumbled"),
    "another error": (lambda: {}["loops"], "KeyError: 'loops'"),
    "a crash": (lambda: os.kill(os.getpid(), 9), "ended with code -9"),
    "a hang": (lambda: time.sleep(600), "it hangs"),
    "a program": (lambda: os.system("touch canary"), "no input may do: os.system"),
    "a pickle": (lambda: pickle.loads(pickle.dumps(EVIL[0])), "no input may do: os.system"),
    "an import": (lambda: __import__("stranger"), "no input may do: open('canary'"),
    "a write": (lambda: Path("/tmp/by the fuzzer").write_text(""), "no input may do: open('/tmp/by the"),
    "a removal": (lambda: os.remove("kept"), "no input may do: os.remove"),
    "a followed link": (lambda: Path("link").read_text(), "no input may do: open('link'"),
    "accepted": (lambda: None, "accepted, but it must be refused"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_anything_else_is_a_fault(what: str) -> None:
    action, complaint = FAULTS[what]
    case = Case(what, action, REFUSED, {"kept": b"", "link": "a link"})
    result, found = run_case(case, limit=2 if what == "a hang" else 60)
    assert result == FAULT
    assert complaint in found
