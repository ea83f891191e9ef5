import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradpolicy.lightning.rank_watch import describe_exit

PROGRAM = Path(__file__).parent / "training_program.py"


def run(folder: Path, *arguments: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of the training program."""
    root = PROGRAM.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("killed", "died: killed by SIGKILL (out of memory?); ending the job"),
        ("raises", "died: ArithmeticError: on purpose; ending the job"),
    ],
)
def test_a_dead_rank_ends_the_job_with_its_number_and_cause(tmp_path: Path, fault: str, told: str) -> None:
    code, errors, seconds = run(tmp_path, "2", "1000000", fault)
    assert code == 1
    assert "[rank 0] rank 1 " in errors
    assert told in errors
    assert seconds < 60


@pytest.mark.slow
def test_the_death_of_the_first_rank_ends_the_others(tmp_path: Path) -> None:
    _, errors, seconds = run(tmp_path, "2", "1000000", "first_killed")
    assert "[rank 1] what launched this rank died: rank 0, or torchrun; ending the job" in errors
    assert seconds < 60


def test_exit_codes_are_told_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-15) == "killed by SIGTERM"
