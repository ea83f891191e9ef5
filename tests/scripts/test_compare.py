"""A comparison runs what is missing, and its table's numbers are those worked out by hand."""

import csv
import io
import math
from pathlib import Path

import compare
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image
from rich.console import Console

from comparisons.families import FAMILIES, Column, Family, Variant
from comparisons.picture import band, read_curve
from comparisons.runs import CONF, Run, finish, runs_of
from comparisons.table import Summary, make_rows, markdown, printed, write_csv
from gradpolicy.errors import PolicyError
from gradpolicy.insight.results import RESULT, Result
from gradpolicy.launch.compose import VERSION_BASE

FAMILY = Family(
    title="Two ways",
    base=Variant("base", ("experiment=first",)),
    variants=(
        Variant("slow", ("user.way=slow", "ckpt_path='{base}/best.ckpt'")),
        Variant("fast", ("user.way=fast",)),
    ),
    columns=(Column("loss", "test/loss", digits=2), Column("kB", "cost/bytes", factor=1e-3, digits=0)),
    curve=("val/loss", "validation loss"),
)
LOSSES = {"base": (9.0, 9.0, 9.0), "slow": (1.0, 2.0, 4.5), "fast": (0.5, 0.5, 0.5)}


def pretend(run: Run) -> None:
    """Leaves what a run would leave."""
    metrics = {"test/loss": LOSSES[run.variant][run.seed]}
    if run.variant == "slow":
        metrics["cost/bytes"] = 2000.0 + 1000.0 * run.seed
    Result(list(run.overrides), metrics, directory=str(run.directory)).save(run.directory / RESULT)
    log = run.directory / "csv/version_0/metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text(f"step,train/loss,val/loss\n0,5,\n1,,{run.seed + 1}\n2,,{run.seed}\n")


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return list(runs_of(FAMILY, [0, 1, 2], tmp_path))


@pytest.fixture
def finished(runs: list[Run]) -> list[Run]:
    finish(runs, begin=lambda run: None, train=pretend)
    return runs


def test_the_base_of_a_seed_is_run_first_and_handed_on(runs: list[Run], tmp_path: Path) -> None:
    assert [(run.variant, run.seed) for run in runs[:4]] == [
        ("base", 0),
        ("slow", 0),
        ("fast", 0),
        ("base", 1),
    ]
    assert f"ckpt_path='{tmp_path}/base/seed-1/best.ckpt'" in runs[4].overrides
    assert "seed=1" in runs[4].overrides


def test_what_is_finished_is_not_run_again(runs: list[Run]) -> None:
    pretend(runs[1])
    trained: list[Run] = []
    finish(runs, begin=lambda run: None, train=trained.append)
    assert trained == [run for run in runs if run != runs[1]]


def test_a_run_with_other_settings_does_not_count(runs: list[Run], tmp_path: Path) -> None:
    pretend(runs[1])
    assert runs[1].result is not None
    again = list(runs_of(FAMILY, [0], tmp_path, ["trainer.max_epochs=9"]))
    assert again[1].directory == runs[1].directory
    assert again[1].result is None


def test_a_result_that_was_broken_off_does_not_count(runs: list[Run]) -> None:
    pretend(runs[1])
    path = runs[1].directory / RESULT
    path.write_text(path.read_text()[:40])
    assert runs[1].result is None


def test_means_and_spreads_are_those_worked_out_by_hand(finished: list[Run]) -> None:
    slow, fast = make_rows(FAMILY, finished)
    # Mean (1 + 2 + 4.5) / 3; deviations −1.5, −0.5, 2: (2.25 + 0.25 + 4) / 2 = 3.25.
    assert slow.summaries[0] == Summary(mean=2.5, spread=pytest.approx(math.sqrt(3.25)))
    assert slow.summaries[1] == Summary(mean=3.0, spread=1.0)
    assert fast.summaries[0] == Summary(mean=0.5, spread=0.0)
    assert math.isnan(fast.summaries[1].mean)
    assert (slow.seeds, fast.seeds) == (3, 3)


def test_one_seed_has_no_spread() -> None:
    assert Summary.of([4.0]).mean == 4.0
    assert Summary.of([4.0]).text(1) == "4.0"
    assert Summary.of([]).text(1) == "–"


def test_an_unfinished_run_is_left_out(finished: list[Run]) -> None:
    (finished[4].directory / RESULT).unlink()
    assert finished[4].variant == "slow"
    row = make_rows(FAMILY, finished)[0]
    assert row.seeds == 2
    assert row.summaries[0].mean == pytest.approx((1.0 + 4.5) / 2)


def test_no_finished_run_at_all_is_an_error(runs: list[Run]) -> None:
    with pytest.raises(PolicyError, match="none of the runs"):
        make_rows(FAMILY, runs)


def test_the_table_is_written_as_markdown_and_csv(finished: list[Run], tmp_path: Path) -> None:
    rows = make_rows(FAMILY, finished)
    lines = markdown(rows, FAMILY.columns).splitlines()
    assert lines == [
        "|  | loss | kB | seeds |",
        "| --- | ---: | ---: | ---: |",
        "| slow | 2.50 ± 1.80 | 3 ± 1 | 3 |",
        "| fast | 0.50 ± 0.00 | – | 3 |",
    ]
    write_csv(rows, FAMILY.columns, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as file:
        slow, fast = csv.DictReader(file)
    assert (slow["variant"], slow["loss"], slow["kB, spread"]) == ("slow", "2.5", "1.0")
    assert fast["kB"] == ""


def test_the_printed_table_has_a_row_a_variant(finished: list[Run]) -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(printed(FAMILY.title, make_rows(FAMILY, finished), FAMILY.columns))
    text = console.file.getvalue()
    assert "Two ways" in text
    assert "2.50 ± 1.80" in text


def test_a_band_holds_the_steps_that_all_seeds_have(finished: list[Run]) -> None:
    curves = [read_curve(run.directory, "val/loss") for run in finished if run.variant == "slow"]
    assert curves[1] == {1: 2.0, 2: 1.0}
    assert band(curves) == ([1, 2], [2.0, 1.0], [1.0, 0.0], [3.0, 2.0])
    assert band([]) == ([], [], [], [])


def test_the_program_shows_the_table_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILIES, "ways", FAMILY)
    finish(list(runs_of(FAMILY, [0, 1, 2], tmp_path)), begin=lambda run: None, train=pretend)
    assert compare.main(["ways", "--only-table", "--out", str(tmp_path)]) == 0
    assert "2.50 ± 1.80" in capsys.readouterr().out
    assert "2.50 ± 1.80" in (tmp_path / "table.md").read_text()
    with Image.open(tmp_path / "table.png") as picture:
        assert picture.width > picture.height > 100


def test_the_program_trains_what_is_missing_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (Column("accuracy", "test/accuracy"),)
    family = Family("Digits", (Variant("plain", ("policy=none",)),), columns, ("val/accuracy", "accuracy"))
    monkeypatch.setitem(FAMILIES, "digits", family)
    arguments = ["digits", "logger=csv", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    arguments += ["callbacks=model_checkpoint", "--seeds", "3", "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    result = tmp_path / "plain/seed-3" / RESULT
    assert 0.0 <= Result.load(result).metrics["test/accuracy"] <= 1.0
    written = result.stat().st_mtime_ns
    assert compare.main(arguments) == 0
    assert result.stat().st_mtime_ns == written


def test_a_run_that_fails_says_why_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    family = Family("Wrong", (Variant("wrong", ("policy=nothing",)),), (), ("val/loss", "loss"))
    monkeypatch.setitem(FAMILIES, "wrong", family)
    assert compare.main(["wrong", "--seeds", "0", "--out", str(tmp_path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "wrong with seed 0: " in message
    assert "no such policy" in message
    assert "no such policy" in (tmp_path / "wrong/seed-0.log").read_text()


def test_an_unknown_comparison_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["fashon"]) == 2
    assert "did you mean 'fashion'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_run_of_a_family_composes(name: str, tmp_path: Path) -> None:
    runs = list(runs_of(FAMILIES[name], [0], tmp_path))
    with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
        configs = [compose("train", list(run.overrides)) for run in runs]
    needs_costs = any(column.metric.startswith("cost/") for column in FAMILIES[name].columns)
    assert all(config.seed == 0 and ("costs" in config.callbacks) == needs_costs for config in configs)
    assert len({run.directory for run in runs}) == len(runs) > 1
