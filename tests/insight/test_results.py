"""Plain characters are printed on streams that do not take UTF-8."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradpolicy.insight.results import Result

CONF = Path(__file__).parents[2] / "conf"

ENDS = {
    ("--help",): 0,
    ("plan_only=true",): 0,
    ("extras.print_config=true", "extras.report=false", "trainer.fast_dev_run=true", "plan_only=false"): 0,
    ("task_name='größer – ∞'",): 0,
    ("policy='gided–'",): 2,
    ("seed='é'",): 2,
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process says to all of these command lines on a terminal that knows ASCII alone."""
    program = (
        "import sys, pathlib; from gradpolicy.launch.app import main\n"
        f"for line, code in {ENDS!r}.items():\n"
        f"    words = ['logger=csv', 'plan_only=true', *line]\n"
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
        "\nConfig\n+-- ",
        "Freeze * Random",
        "there is no such policy",
    ):
        assert said in printed


@pytest.mark.slow
def test_letters_lose_their_accents_and_dashes_become_plain(printed: str) -> None:
    assert "got 'e'" in printed
    assert "policy=gided-:" in printed


def test_a_result_is_read_as_it_was_saved(tmp_path: Path) -> None:
    saved = Result(
        ["a=1"], {"test/loss": math.inf, "n": 3.0}, 0.5, "failed", "why", "runs/1", "train", seconds=2.5
    )
    saved.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == saved
