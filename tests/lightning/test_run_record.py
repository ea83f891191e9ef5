"""The record by which a run is found: what kind of run it is, and when it began."""

from pathlib import Path

import pytest

from gradpolicy.lightning.run_record import RECORD, RunRecord, record_of

REPORTING = {"study": {"_target_": "gradpolicy.commands.sweep.PruneTrial"}, "off": None}


@pytest.mark.parametrize(
    ("callbacks", "in_sweep", "kind"),
    [
        (None, False, "run"),
        ({"bar": {"_target_": "lightning.pytorch.callbacks.RichProgressBar"}}, False, "run"),
        (None, True, "sweep"),
        (REPORTING, False, "trial"),
        (REPORTING, True, "trial"),
    ],
)
def test_it_tells_a_run_a_job_of_a_sweep_and_a_trial_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callbacks, in_sweep: bool, kind: str
) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert record_of(tmp_path, "train", callbacks, in_sweep).kind == kind


def test_a_run_that_an_agent_of_wandb_starts_is_a_job_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert record_of(tmp_path, "train", None, in_sweep=False).kind == "sweep"


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    record = record_of(tmp_path, "train", None, in_sweep=False)
    record.save()
    loaded = RunRecord.load(tmp_path)
    assert loaded == record
    assert set(record.versions) == {"gradpolicy", "python", "torch", "lightning", "numpy", "hydra-core"}
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"task": "train"}'])
def test_a_record_that_is_absent_or_damaged_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RECORD).write_text(content)
    assert RunRecord.load(tmp_path) is None


def test_a_kind_that_does_not_exist_is_no_record(tmp_path: Path) -> None:
    RunRecord("train", "other", 1.0, str(tmp_path)).save()
    assert RunRecord.load(tmp_path) is None
