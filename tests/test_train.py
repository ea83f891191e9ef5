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
)
pytestmark = pytest.mark.slow


def test_the_default_job_reaches_its_accuracy_and_leaves_what_it_promises(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (run,) = tmp_path.glob("outputs/train/runs/*")
    for left in LEFT:
        assert (run / left).stat().st_size, left
    assert "Results" in (run / "train.log").read_text()
    assert list(run.glob("wandb/offline-run-*/run-*.wandb"))
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    assert metrics["test/accuracy"] >= 0.97
    assert metrics["test/probe_accuracy"] >= 0.9
    audit = json.loads((run / "audit.json").read_text())
    assert audit["intervals"] > 0
    assert (audit["changed"], audit["differences"]) == (0, [])
    (path,) = run.glob("csv/*/metrics.csv")
    table = pandas.read_csv(path)
    shares = table["policy/random_freeze/active_share"].dropna()
    assert len(shares)
    assert shares.between(0.45, 0.55).all()
    assert table["policy/straight_through/gradient_norm_after"].notna().any()
