"""`gradpolicy resume` goes on with a run by its own command line."""

import shutil
from pathlib import Path

import pytest
import torch

from gradpolicy.app.cli import main
from gradpolicy.train.lightning.runs import RunRecord
from tests.app.conftest import CONF


def test_a_run_goes_on_by_the_command_line_that_began_it(train, tmp_path: Path, monkeypatch) -> None:
    first = train("seed=5", "test=false", "extras.plan=false", "trainer.max_epochs=1")
    monkeypatch.chdir(tmp_path)
    assert main(["resume", str(first.run), "trainer.max_epochs=2"], CONF) == 0
    assert torch.load(first.run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert {"seed=5", "trainer.max_epochs=2"} <= set(RunRecord.load(first.run).command)


def test_a_run_goes_on_with_the_configs_that_it_was_given(train, tmp_path: Path) -> None:
    mine = shutil.copytree(CONF, tmp_path / "conf")
    (mine / "policy/mine.yaml").write_text("cut: {_target_: gradpolicy.Stop, modules: model.probe}\n")
    first = train("--config-path", str(mine), "policy=mine", "test=false", "extras.plan=false")
    assert main(["resume", str(first.run), "trainer.max_epochs=2"], CONF) == 0
    assert torch.load(first.run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4


@pytest.mark.parametrize("words", [["a", "b"], ["nowhere"], []])
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, refusal, words) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("resume", *words).startswith("resume: " if words else "ckpt_path=last: ")
