"""The table of a sweep, and plain characters for streams that do not take UTF-8."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gradpolicy.insight.results import SUMMARY, Result, best_of, summarize

CONF = Path(__file__).parents[2] / "conf"

RESULTS = [
    Result(["seed=1", "logger=csv"], optimized=0.25),
    Result(["seed=2", "logger=csv"], optimized=float("nan")),
    Result(["seed=3", "logger=csv"], status="failed", error="no memory"),
    Result(["seed=4", "logger=csv"], optimized=0.75),
]


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 0)])
def test_the_best_is_the_largest_or_smallest_number(mode: str, best: int) -> None:
    assert best_of(RESULTS, mode) == best
    assert best_of(RESULTS[1:3], mode) is None


def test_the_table_names_what_differs_and_marks_the_best(tmp_path: Path) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        summarize(RESULTS, "val/accuracy", "max", console, tmp_path / SUMMARY)
    lines = capture.get().splitlines()
    (marked,) = [line for line in lines if "*" in line]
    assert "seed=4" in marked
    assert "logger=csv" not in marked
    assert any("no memory" in line for line in lines)
    with (tmp_path / SUMMARY).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["best"] for row in rows] == ["False", "False", "False", "True"]
    assert rows[3]["val/accuracy"] == "0.75"


def test_lists_in_overrides_are_printed_as_they_were_written() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        summarize([Result(["policy=[stop,guided]"]), Result(["policy=none"])], None, "max", console)
    assert "policy=[stop,guided]" in capture.get()


# ---- streams

ENDS = {"--help": 0, "plan_only=true": 0, "task_name='größer – ∞'": 0, "policy='gided–'": 2, "seed='é'": 2}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process says to all of these command lines on a terminal that knows ASCII alone."""
    program = (
        "import sys, pathlib; from gradpolicy.launch.app import main\n"
        f"for line, code in {ENDS!r}.items():\n"
        f"    words = [line, 'logger=csv', 'plan_only=true']\n"
        f"    assert main(pathlib.Path({str(CONF)!r}), words) == code\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        cwd=tmp_path_factory.mktemp("place"),
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return (done.stdout + done.stderr).decode("ascii")


@pytest.mark.slow
def test_help_plan_config_and_errors_are_printed_in_ascii(printed: str) -> None:
    for said in (
        "outputs/train/runs/.../checkpoints",
        "Config",
        "Freeze * Random",
        "there is no such policy",
    ):
        assert said in printed


def test_letters_lose_their_accents_and_dashes_become_plain(printed: str) -> None:
    assert "got 'e'" in printed
    assert "policy=gided-:" in printed
