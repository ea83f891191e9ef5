"""Killed runs end as the undisturbed one; the short version of ``python scripts/soak.py --kills 30``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soak import differences

PROGRAM = Path(__file__).parents[2] / "scripts" / "soak.py"
SHORT = ("trainer.limit_train_batches=6", "trainer.limit_val_batches=1", "data.batch_size=32")


def soak(*arguments: str) -> str:
    """What the program says in the end."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--epochs=2", "--save-every=2", *arguments, *SHORT],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_a_run_killed_twice_ends_with_the_same_bits_and_rows() -> None:
    assert soak("--kills=2", "--accumulate=2").startswith("2 kills, not one bit of difference")


@pytest.mark.slow
def test_so_does_one_on_two_processes_with_loader_workers() -> None:
    said = soak("--kills=4", "--ranks=2", "--workers=1", "--seed=1")
    assert said.startswith("4 kills, not one bit of difference")


def test_one_bit_of_difference_is_told_with_its_place() -> None:
    first = {"weights": [torch.ones(2), torch.zeros(2)], "step": 3, "log": {"path": "here"}}
    second = {"weights": [torch.ones(2), torch.tensor([0.0, 1e-38])], "step": 4, "log": {"path": "there"}}
    assert differences(first, first) == []
    assert [line.split(":")[0] for line in differences(first, second)] == [".weights[1]", ".step"]
    assert differences({"moment": torch.ones(1)}, {"moment": torch.ones(1).double()}), "another dtype"
    assert differences({"mask": 1}, {}) == [".mask: only in one of them"]
