"""The default job as a person runs it: all four kinds of policy, on real data, to its accuracy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

ROOT = Path(__file__).parents[1]
LEFT = (
    "config.yaml",
    "plan.json",
    "plan.txt",
    "train.log",
    "record.jsonl",
    "audit.json",
    "report.html",
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
    "pictures/guided.png",
)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("default job")]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that `python train.py` leaves; it is run once, elsewhere than in the checkout."""
    place = tmp_path_factory.mktemp("default")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (run,) = place.glob("outputs/train/runs/*")
    return run


def test_the_default_job_reaches_its_accuracy(default_run: Path) -> None:
    metrics = json.loads((default_run / "result.json").read_text())["metrics"]
    assert metrics["test/accuracy"] >= 0.97
    assert metrics["test/probe_accuracy"] >= 0.9


def test_it_leaves_what_it_promises(default_run: Path) -> None:
    for left in LEFT:
        assert (default_run / left).stat().st_size, left
    assert "Results" in (default_run / "train.log").read_text()
    assert list(default_run.glob("wandb/offline-run-*/run-*.wandb"))


def test_frozen_entries_kept_their_bits(default_run: Path) -> None:
    audit = json.loads((default_run / "audit.json").read_text())
    assert audit["intervals"] > 0
    assert (audit["changed"], audit["differences"]) == (0, [])


def test_metrics_tell_of_each_policy(default_run: Path) -> None:
    (path,) = default_run.glob("csv/*/metrics.csv")
    table = pandas.read_csv(path)
    shares = table["policy/random_freeze/active_share"].dropna()
    assert len(shares)
    assert shares.between(0.45, 0.55).all()
    assert table["policy/straight_through/gradient_norm_after"].notna().any()
