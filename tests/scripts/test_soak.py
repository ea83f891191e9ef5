"""Killed runs end as the undisturbed one; the short version of ``python scripts/soak.py --kills 50``."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradpolicy.insight.run_files import Result
from soaking.comparing import compare, differences

PROGRAM = Path(__file__).parents[2] / "scripts" / "soak.py"
SHORT = ("trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")


def soak(*arguments: str) -> str:
    """What the program says in the end."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--epochs=3", *arguments, *SHORT],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


# Phases that end by a metric, with checkpoints before and after each validation.
PHASES = (
    "policy=none",
    "+policy.thaw={_target_:gradpolicy.Freeze,frozen_state:zero,mask:{_target_:gradpolicy.masks.Phases,phases:["
    "{params:'*.bias',until:{metric:val/loss,patience:1},best:true},{params:'*.weight'}]}}",
)


MIXTURE = (
    *PHASES,
    "optimizer=muon",
    "trainer.precision=bf16-mixed",
    "model.model._target_=soaking.models.Checkpointed",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--kills=3", "--ranks=2", "--workers=1", "--seed=1"],
        ["--kills=2", "--accumulate=2", "--save-every=1", *PHASES],
        ["--kills=1", "--ranks=2", "--save-every=1", *MIXTURE],
    ],
    ids=["two ranks with loader workers", "phases under accumulation", "everything on two ranks"],
)
def test_a_killed_run_ends_with_the_same_bits_and_rows(arguments: list[str]) -> None:
    assert soak(*arguments).startswith(f"{arguments[0][-1]} kills, not one bit of difference")


def test_one_bit_of_difference_is_told_with_its_place() -> None:
    first = {"weights": [torch.ones(2), torch.zeros(2)], "step": 3, "path": "/a/train/runs/1/best.ckpt"}
    second = {**first, "weights": [torch.ones(2), torch.tensor([0.0, 1e-38])], "step": 4}
    assert differences(first, {**first, "path": "/b/train/runs/2/best.ckpt"}) == []
    assert [line.split(":")[0] for line in differences(first, second)] == [".weights[1]", ".step"]
    assert differences({"moment": torch.ones(1)}, {"moment": torch.ones(1).double()}), "another dtype"
    names = [f"{'weight'}{index}" for index in (1, 1, 2)]
    apart, joined, other = (saved({"names": each}) for each in (names[:2], names[:1] * 2, names[1:]))
    assert apart != joined
    assert differences({"state": apart}, {"state": joined}) == []
    assert differences({"state": apart}, {"state": other})[0].startswith(".state.names[1]: 'weight1' became")
    assert differences({"mask": 1}, {}) == [".mask: only in one of them"]


def saved(state: object) -> bytes:
    torch.save(state, written := io.BytesIO())
    return written.getvalue()


def end(folder: Path, best: float, accuracy: float, loss: str) -> Path:
    """What a run left."""
    run = folder / "train/runs/2026-01-01_00-00-00-000"
    (run / "checkpoints").mkdir(parents=True)
    torch.save({"weight": torch.tensor(best)}, run / "checkpoints/best.ckpt")
    Result([], {"test/accuracy": accuracy}).save(run / "result.json")
    (run / "csv").mkdir()
    (run / "csv/metrics.csv").write_text(f"step,train/loss\n1,{loss}\n")
    (run / "record.jsonl").write_text(f'{{"kind": "memory"}}\n{{"step": {best}}}\n')
    return folder


def test_checkpoints_results_and_logs_are_compared(tmp_path: Path) -> None:
    alone = end(tmp_path / "alone", 1.0, 0.5, "0.25")
    assert compare(alone, end(tmp_path / "same", 1.0, 0.5, "0.25")) == []
    found = compare(alone, end(tmp_path / "other", 2.0, 0.75, "0.5"))
    assert [line.split(":")[0] for line in found] == [
        "best.ckpt.weight",
        "result.json.metrics.test/accuracy",
        "metrics.csv, row 1",
        "record.jsonl, row 2",
    ]
    lacking = end(tmp_path / "lacking", 1.0, 0.5, "0.25")
    next(lacking.rglob("best.ckpt")).unlink()
    assert compare(alone, lacking) == ["checkpoints: ['best.ckpt'] became []"]
