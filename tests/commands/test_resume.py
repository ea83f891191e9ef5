"""`gradpolicy resume` goes on with a run by its own command line."""

from pathlib import Path

import pytest
import torch

from gradpolicy.commands import resume
from gradpolicy.commands.cli import main
from gradpolicy.lightning.runs import RunRecord, list_checkpoint
from tests.launch.conftest import CONF


def test_a_run_goes_on_by_the_command_line_that_began_it(train, tmp_path: Path, monkeypatch) -> None:
    first = train("seed=5", "test=false", "extras.plan=false", "trainer.max_epochs=1")
    record = RunRecord.load(first.run)
    # What a directory allows itself is left out.
    record.command.extend(["allowed_targets=[stranger]", "extensions=[stranger.rules]"])
    record.save()
    monkeypatch.chdir(tmp_path)
    assert main(["resume", str(first.run), "trainer.max_epochs=2"], CONF) == 0
    assert torch.load(first.run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert first.run.is_dir()
    command = RunRecord.load(first.run).command
    assert {"seed=5", "trainer.max_epochs=2"} <= set(command)
    assert not any("stranger" in word for word in command)


def test_a_directory_has_no_command_run_by_a_shell(tmp_path: Path, monkeypatch) -> None:
    given = ["hydra/launcher=submitit_slurm", "+hydra.launcher.setup=[touch canary]", "seed=5"]
    RunRecord.begin(tmp_path, "train", "run", given).save()
    (tmp_path / "last.ckpt").touch()
    list_checkpoint(tmp_path, tmp_path / "last.ckpt")
    monkeypatch.setattr(resume, "find_checkpoint", lambda *_: tmp_path / "last.ckpt")
    called: list[list[str]] = []
    monkeypatch.setattr(resume, "train", lambda config_dir, words: called.append(words) or 0)
    assert main(["resume", str(tmp_path)], CONF) == 0
    assert called == [["seed=5", f"ckpt_path='{tmp_path}'"]]


@pytest.mark.parametrize("words", [["a", "b"], ["nowhere"], []])
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, refusal, words) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("resume", *words)
