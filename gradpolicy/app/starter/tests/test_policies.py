"""Frozen weights keep their bits, and the rounded trunk learns."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from lightning import Trainer

import gradpolicy as gp

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from my_project.data import Spirals  # noqa: E402
from my_project.model import Classifier  # noqa: E402


def test_a_frozen_layer_keeps_its_bits_and_the_others_learn() -> None:
    """Only the weights of the frozen layer are unchanged."""
    model = Classifier(torch.optim.AdamW)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "first": gp.Freeze(params="trunk.0.*"),
    }
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[gp.GradientPolicies(policies)],
    )
    trainer.fit(model, Spirals())
    kept = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert kept == {"trunk.0.weight", "trunk.0.bias"}


def test_the_job_trains_and_no_frozen_entry_has_changed(tmp_path: Path) -> None:
    """The run writes a report, and its audit finds no change."""
    place = f"paths.log_dir={tmp_path}"
    subprocess.run([sys.executable, str(PROJECT / "train.py"), "trainer.accelerator=cpu", place], check=True)
    (run,) = tmp_path.glob("my_project/runs/*")
    assert json.loads((run / "audit.json").read_text())["changed"] == 0
    assert json.loads((run / "result.json").read_text())["metrics"]["test/accuracy"] > 0.9
    assert (run / "report.html").is_file()
