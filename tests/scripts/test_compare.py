"""A comparison runs what is missing, and its table holds means and standard deviations over the seeds."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

import compare
from compare import COMPARISONS, CONF, Comparison, Run, runs_of
from gradpolicy.app.config import VERSION_BASE
from gradpolicy.insight.run_files import RESULT, Result

TWO_WAYS = Comparison(
    title="Two ways",
    base=["experiment=first"],
    rows={"slow": ["user.way=slow", "ckpt_path='{base}/best.ckpt'"], "fast": ["user.way=fast"]},
    columns=[
        {"heading": "loss", "metric": "test/loss", "digits": 2},
        {"heading": "kB", "metric": "cost/bytes", "factor": 1e-3, "digits": 0},
    ],
    curve={"metric": "val/loss", "label": "validation loss"},
)
LOSSES = {"base": (9.0, 9.0, 9.0), "slow": (1.0, 2.0, 4.5), "fast": (0.5, 0.5, 0.5)}


def pretend(run: Run) -> None:
    """Write what a finished run leaves."""
    metrics = {"test/loss": LOSSES[run.row][run.seed]}
    if run.row == "slow":
        metrics["cost/bytes"] = 2000.0 + 1000.0 * run.seed
    log = run.directory / "csv/version_0/metrics.csv"
    log.parent.mkdir(parents=True)
    Result(list(run.overrides), metrics, directory=str(run.directory)).save(run.directory / RESULT)
    log.write_text(f"step,train/loss,val/loss\n0,5,\n1,,{run.seed + 1}\n2,,{run.seed}\n")


def test_results_count_for_their_settings_only(tmp_path: Path) -> None:
    runs = list(runs_of(TWO_WAYS, [0, 1, 2], tmp_path))
    assert [(run.row, run.seed) for run in runs[:4]] == [("base", 0), ("slow", 0), ("fast", 0), ("base", 1)]
    assert f"ckpt_path='{tmp_path}/base/seed-1/best.ckpt'" in runs[4].overrides
    assert "seed=1" in runs[4].overrides
    pretend(runs[1])
    assert runs[1].result is not None
    again = list(runs_of(TWO_WAYS, [0], tmp_path, ["trainer.max_epochs=9"]))
    assert again[1].directory == runs[1].directory
    assert again[1].result is None
    path = runs[1].directory / RESULT
    path.write_text(path.read_text()[:40])
    assert runs[1].result is None


def test_the_table_has_means_and_sample_standard_deviations_of_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMPARISONS, "ways", TWO_WAYS)
    finished = list(runs_of(TWO_WAYS, [0, 1, 2], tmp_path))
    arguments = ["ways", "--only-table", "--out", str(tmp_path)]
    assert compare.main(arguments) == 2
    assert "none of the runs" in capsys.readouterr().err
    for run in finished:
        pretend(run)
    assert compare.main(arguments) == 0
    assert "2.50 ± 1.80" in capsys.readouterr().out
    # Mean (1 + 2 + 4.5) / 3; deviations −1.5, −0.5, 2: (2.25 + 0.25 + 4) / 2 = 3.25.
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "|  | loss | kB | seeds |",
        "| --- | ---: | ---: | ---: |",
        "| slow | 2.50 ± 1.80 | 3 ± 1 | 3 |",
        "| fast | 0.50 ± 0.00 | – | 3 |",
    ]
    assert "mean, loss" in (tmp_path / "table.csv").read_text()
    with Image.open(tmp_path / "table.png") as picture:
        assert picture.width > picture.height > 100


def test_the_program_trains_what_is_missing_and_says_why_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"plain": ["policy=none"], "wrong": ["policy=nothing"]}
    digits = Comparison("Digits", rows, [], {"metric": "val/accuracy", "label": "accuracy"})
    monkeypatch.setitem(COMPARISONS, "digits", digits)
    arguments = ["digits", "logger=csv", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    arguments += ["callbacks=model_checkpoint", "--seeds", "3", "--out", str(tmp_path)]
    assert compare.main(arguments) == 2
    result = tmp_path / "plain/seed-3" / RESULT
    written = result.stat().st_mtime_ns
    assert 0.0 <= Result.load(result).metrics["test/accuracy"] <= 1.0
    assert compare.main(arguments) == 2
    assert result.stat().st_mtime_ns == written
    message = " ".join(capsys.readouterr().err.split())
    assert "wrong with seed 3: " in message
    assert "policy=nothing: there is no such config" in (tmp_path / "wrong/seed-3.log").read_text()
    assert compare.main(["fashon"]) == 2
    assert "did you mean 'fashion'" in capsys.readouterr().err


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", sorted(COMPARISONS))
def test_every_run_of_a_comparison_composes(name: str, tmp_path: Path) -> None:
    runs = list(runs_of(COMPARISONS[name], [0], tmp_path))
    with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
        configs = [compose("train", list(run.overrides)) for run in runs]
    assert all(config.seed == 0 for config in configs)
    assert len({run.directory for run in runs}) == len(runs) > 1
