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
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import gradpolicy.launch.run as door
from fuzz import fuzz
from fuzzing import commands, policies
from fuzzing.case import ACCEPT, EITHER, REFUSE, Case, Expectation, command
from fuzzing.dangers import FILES, RunsWhenRead, allowed
from fuzzing.judging import ACCEPTED, FAULT, REFUSED, judge, same
from fuzzing.running import Outcome, run_case
from fuzzing.values import written

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
    """A program that composes this config, whatever it is told."""

    def program(arguments: Sequence[str]) -> int:
        door.run(OmegaConf.create(config), [])
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
    """Runs a case with a program; what it was judged to be, and the complaint."""
    monkeypatch.setattr(door, "run", lambda config, overrides: None)

    def run(
        program: Callable,
        *overrides: str,
        expectation: Expectation = EITHER,
        limit: float = 60,
        **more: object,
    ) -> tuple[str, str]:
        case = Case(
            "planted", command(*overrides, base=("plan_only=true",)), expectation, files=FILES, **more
        )
        verdict = judge(case, run_case(case, program, limit))
        return verdict.result, verdict.complaint

    return run


def test_what_is_accepted_and_holds_its_values_is_right(judged) -> None:
    assert judged(runs(RIGHT), "seed=3", expectation=ACCEPT) == (ACCEPTED, "")


def test_what_is_refused_in_one_line_is_right(judged) -> None:
    assert judged(refuses(), "seed=abc", expectation=REFUSE, names=("seed",)) == (REFUSED, "")


def test_warnings_beside_the_line_are_no_fault(judged) -> None:
    assert judged(refuses("warning: passed over: old.ckpt\nerror: no checkpoint"))[0] == REFUSED


REFUSALS = {
    "two lines": ("error: seed\nmore of it", "2 lines instead of one"),
    "no line": ("", "0 lines instead of one"),
    "an empty message": ("error: ", "an empty message"),
    "a long line": (f"error: {'a' * 600}", "a line of 607 characters"),
    "torch's advice": ("error: load it with weights_only=False", "weights_only"),
    "a stumble": ("error: trainer: KeyError: 'loops'", "stumbled"),
    "an address": ("error: no <object object at 0x7f12e03ab560>", "stumbled"),
    "another key": ("error: optimizer: is wrong", "names none of 'seed'"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_that_is_no_clear_line_is_a_fault(judged, what: str) -> None:
    message, complaint = REFUSALS[what]
    result, found = judged(refuses(message), "seed=abc", names=("seed",))
    assert result == FAULT
    assert complaint in found


def crashes(arguments: Sequence[str]) -> int:
    raise ValueError("seed")


def prints_a_traceback(arguments: Sequence[str]) -> int:
    print("Traceback (most recent call last):\n  …\nValueError: seed")
    return refuses()(arguments)


def is_killed(arguments: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hangs(arguments: Sequence[str]) -> int:
    time.sleep(600)
    return 0


ENDS = {
    crashes: "exit code 1",
    refuses(code=130): "exit code 130",
    prints_a_traceback: "a traceback",
    is_killed: "ended by signal 9",
}


@pytest.mark.parametrize("program", ENDS)
def test_another_end_is_a_fault(judged, program: Callable) -> None:
    assert judged(program) == (FAULT, ENDS[program])


def test_a_program_that_hangs_is_killed_and_a_fault(judged) -> None:
    result, complaint = judged(hangs, limit=0.5)
    assert result == FAULT
    assert complaint.startswith("it hangs: killed after")


def test_what_is_left_behind_is_a_fault(judged) -> None:
    written_file = first(lambda: Path("outputs").mkdir())
    assert judged(written_file) == (FAULT, "left behind: outputs is new")
    # Where it was accepted and only planned, too.
    assert judged(first(lambda: Path("outputs").mkdir(), runs(RIGHT)))[0] == FAULT
    changed = first(lambda: Path("guarded/keep.txt").write_text("yours"))
    assert judged(changed) == (FAULT, "left behind: guarded/keep.txt was changed")
    removed = first(lambda: Path("guarded/keep.txt").unlink())
    assert judged(removed) == (FAULT, "left behind: guarded/keep.txt is gone")


def test_a_sweep_may_leave_its_runs(judged) -> None:
    leaves = first(lambda: Path("outputs").mkdir(), runs(RIGHT))
    assert judged(leaves, "-m", expectation=ACCEPT)[0] == ACCEPTED


FORBIDDEN = {
    "os.system": lambda: os.system("touch canary"),
    "subprocess.Popen": lambda: subprocess.run(["touch", "canary"]),
    "os.posix_spawn": lambda: os.posix_spawn("/usr/bin/touch", ["touch", "canary"], {}),
    "os.exec": lambda: os.execvp("touch", ["touch", "canary"]),
    "os.system, unpickled": lambda: pickle.loads(pickle.dumps(RunsWhenRead())),
    "open": lambda: Path("/tmp/written by the fuzzer").write_text(""),
    "os.mkdir": lambda: os.mkdir("/tmp/made by the fuzzer"),
    "os.remove": lambda: os.remove("/tmp/../nothing"),
    "os.rename": lambda: os.rename("guarded", "/tmp/moved by the fuzzer"),
    "os.fork": lambda: [os.fork() or os._exit(0) for _ in range(20)],
}


@pytest.mark.parametrize("event", FORBIDDEN)
def test_what_no_input_may_do_is_prevented_and_a_fault(judged, event: str) -> None:
    result, complaint = judged(first(FORBIDDEN[event]))
    assert result == FAULT
    assert complaint.startswith(f"it did what no input may do: {event.partition(',')[0]}")
    assert not list(Path("/tmp").glob("* by the fuzzer"))


def test_importing_a_strangers_module_is_a_fault(judged) -> None:
    assert judged(first(lambda: __import__("stranger")))[1] == "left behind: canary is new"


def test_nonsense_that_is_accepted_is_a_fault(judged) -> None:
    assert judged(runs(RIGHT), "seed=abc", expectation=REFUSE) == (FAULT, "accepted, although it is wrong")


def test_sense_that_is_refused_is_a_fault(judged) -> None:
    assert judged(refuses(), expectation=ACCEPT) == (
        FAULT,
        "refused, although there is nothing wrong with it",
    )


def test_exit_code_0_without_a_run_is_a_fault(judged) -> None:
    assert judged(lambda arguments: 0) == (FAULT, "accepted, but nothing was run")


IGNORED = {
    "seed=4": "seed is 3 instead of 4",
    "seed=3.0": "seed is 3 instead of 3.0",
    "~seed": "seed is 3 instead of absent",
    "+user.mine=[1,2]": "user.mine is absent instead of [1, 2]",
}


@pytest.mark.parametrize("override", IGNORED)
def test_a_value_that_is_not_held_is_a_fault(judged, override: str) -> None:
    assert judged(runs(RIGHT), override) == (FAULT, f"accepted, but {IGNORED[override]}")


def test_a_value_that_the_mutation_knows_is_asked_for(judged) -> None:
    reference = {**RIGHT, "optimizer": {"lr": "${rate}"}, "rate": 0.5}
    assert judged(runs(reference), holds={"optimizer.lr": 0.5})[0] == ACCEPTED
    assert judged(runs(reference), holds={"optimizer.lr": 0.25})[0] == FAULT


def test_other_metrics_than_those_of_the_weights_are_a_fault() -> None:
    case = Case("planted", (), metrics={"test/loss": 2.0})
    assert judge(case, Outcome(0, config={}, metrics={"test/loss": 2.0})).result == ACCEPTED
    assert judge(case, Outcome(0, config={}, metrics={"test/loss": 2.5})).result == FAULT


# ---- what is drawn


def test_a_fault_is_shrunk_and_each_sort_is_told_once(
    judged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(arguments: Sequence[str]) -> int:
        number = int(arguments[0])
        print("error: seed" if number < 50 else f"error: at 0x{number:06x}", file=sys.stderr)
        return 1 if number > 200 else 2

    monkeypatch.setattr("fuzz.program", program)
    monkeypatch.setattr("fuzz.KEPT", tmp_path)
    drawn = st.integers(0, 1000).map(lambda number: Case("a number", (str(number),)))
    counts = fuzz(drawn, number=0, cases=100, limit=60)
    said = capsys.readouterr().out
    assert counts[FAULT] > 0
    assert counts[REFUSED] > 0
    assert said.count("fault: ") == 2
    # The smallest numbers of either sort.
    assert "python train.py 50\n" in said
    assert "python train.py 201\n" in said
    assert any(tmp_path.rglob("*"))


@pytest.mark.parametrize("cases", [commands.cases, policies.cases])
def test_cases_are_of_many_sorts(cases: Callable) -> None:
    drawn: list[Case] = []

    @seed(0)
    @settings(max_examples=150, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def keep(case: Case) -> None:
        drawn.append(case)

    keep()
    assert len({case.what for case in drawn}) >= 8
    assert {case.expectation for case in drawn} == {*Expectation}


def test_every_allowed_callable_is_given_arguments_that_load() -> None:
    names = {name for name, _ in allowed()}
    assert {"gradpolicy.masks.Random", "gradpolicy.policies.Freeze", "torch.nn.Linear"} <= names
    assert len(names) > 300


def test_a_written_value_is_read_as_it_was(judged) -> None:
    value = {"a": [1, None, True, "x'y"], "b": {"c": 0.5}}
    override = f"+user={written(value)}"
    assert judged(runs({**RIGHT, "user": value}), override)[0] == ACCEPTED
    assert judged(runs({**RIGHT, "user": {**value, "a": []}}), override)[0] == FAULT


def test_values_are_compared_with_their_types() -> None:
    assert same(float("nan"), float("nan"))
    assert same({"a": [1], "more": 2}, {"a": [1]})
    assert not same(1, True)
    assert not same(1, 1.0)
    assert not same([1], [1, 2])
    assert not same({}, {"a": None})
