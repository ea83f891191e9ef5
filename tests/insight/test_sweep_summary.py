"""The summary of a sweep: a column for each override, and means over seeds."""

import math
from pathlib import Path

import pandas
import pytest
from rich.console import Console

from gradpolicy.insight.run_files import Result
from gradpolicy.insight.sweep_summary import SUMMARY, SweepSummary

RESULTS = [
    Result(["seed=1", "logger=csv"], optimized=0.25),
    Result(["seed=2", "logger=csv"], optimized=float("nan")),
    Result(["seed=3", "logger=csv"], status="failed", error="no memory"),
    Result(["seed=4", "logger=csv"], optimized=0.75),
]
GRID = [
    Result(["policy=[stop,guided]", "seed=1", "+x.y=1"], optimized=0.5),
    Result(["policy=[stop,guided]", "seed=2", "+x.y=1"], optimized=0.7),
    Result(["policy=none", "seed=1", "+x.y=1"], optimized=0.2),
    Result(["policy=none", "seed=2", "+x.y=1"], optimized=0.2),
]


def printed(summary: SweepSummary) -> list[str]:
    console = Console(width=100)
    with console.capture() as capture:
        summary.show(console)
    return capture.get().splitlines()


def test_the_best_is_the_largest_or_smallest_number() -> None:
    assert SweepSummary(RESULTS, mode="max").best == 3
    assert SweepSummary(RESULTS, mode="min").best == 0
    assert SweepSummary(RESULTS[1:3], mode="max").best is None


def test_the_table_has_a_column_for_what_differs_and_marks_the_best(tmp_path: Path) -> None:
    summary = SweepSummary(RESULTS, "val/accuracy")
    lines = printed(summary)
    assert lines[2].replace("┃", " ").split() == ["job", "seed", "val/accuracy", "best"]
    (marked,) = [line for line in lines if "*" in line]
    assert marked.replace("│", " ").split() == ["3", "4", "0.75", "*"]
    assert any("no memory" in line for line in lines)
    summary.write(tmp_path / SUMMARY, Console(quiet=True))
    table = pandas.read_csv(tmp_path / SUMMARY)
    assert table["best"].tolist() == [False, False, False, True]
    assert table["val/accuracy"][3] == 0.75
    assert table["seed"].tolist() == [1, 2, 3, 4]
    assert set(table["logger"]) == {"csv"}


def test_seeds_are_folded_into_mean_and_sample_deviation() -> None:
    summary = SweepSummary(GRID, "val/loss")
    folded = summary.over_seeds()
    assert folded["policy"].tolist() == ["[stop,guided]", "none"]
    assert folded["mean"].tolist() == pytest.approx([0.6, 0.2])
    assert folded["std"].tolist() == pytest.approx([0.2 / math.sqrt(2), 0.0])
    assert folded["count"].tolist() == [2, 2]
    # Lists are printed as they were written: of two jobs, and of their mean.
    *_, last = lines = [line for line in printed(summary) if "[stop,guided]" in line]
    assert len(lines) == 3
    assert "0.6 ± 0.14" in last


def test_nothing_is_folded_without_seeds_and_jobs_without_a_value_do_not_count() -> None:
    assert SweepSummary([Result(["x=1"], optimized=1.0), Result(["x=2"], optimized=2.0)]).over_seeds() is None
    folded = SweepSummary(RESULTS).over_seeds()
    assert folded["count"].tolist() == [2]
    assert folded["mean"].tolist() == [0.5]
