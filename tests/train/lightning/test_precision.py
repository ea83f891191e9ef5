"""Policies hold, and a run resumes to the same bits, in every precision and on every device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from gradpolicy.insight.audit import Audit
from tests.insight.record_program import train

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Lightning scales losses, as fp16 asks for, on accelerators alone.
CASES = [
    *(("cpu", precision, False) for precision in ("32-true", "bf16-true", "bf16-mixed")),
    pytest.param("cpu", "bf16-true", True, marks=pytest.mark.supports("master weights", loop="lightning")),
    *(
        pytest.param("gpu", precision, False, marks=ON_GPU)
        for precision in ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
    ),
]


def run(folder: Path, resume: Path | None = None, **settings: Any) -> dict:
    """Thirty steps with frozen entries watched; what the checkpoint at the end holds."""
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=7, save_last=True, save_top_k=-1)
    audit = Audit(folder)
    train(folder, saving, audit, resume=resume, max_steps=30, val_check_interval=6, **settings)
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.supports("mixed precision", "audit", "resume", loop="lightning")
@pytest.mark.parametrize(("accelerator", "precision", "master_weights"), CASES)
def test_frozen_entries_hold_and_a_resumed_run_ends_with_the_same_bits(
    tmp_path, accelerator, precision, master_weights
):
    settings = {"accelerator": accelerator, "precision": precision, "master_weights": master_weights}
    whole = run(tmp_path / "whole", **settings)
    found = json.loads((tmp_path / "whole" / "audit.json").read_text())
    assert found["intervals"] > 0
    assert found["changed"] == 0
    (middle,) = (tmp_path / "whole" / "checkpoints").glob("*step=14.ckpt")
    resumed = run(tmp_path / "resumed", middle, **settings)
    for part in ("state_dict", "optimizer_states"):
        for ours, theirs in zip(tree_leaves(resumed[part]), tree_leaves(whole[part]), strict=True):
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same
