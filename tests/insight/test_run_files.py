"""Whatever became of a run's files: what is wrong is named, and nothing else is lost."""

import json
from pathlib import Path

import pytest
from run_directories import write_run

from gradpolicy.errors import PolicyError
from gradpolicy.insight.report.recorded_run import read_run
from gradpolicy.insight.run_files import Result
from gradpolicy.insight.sweep_summary import SweepSummary, collect


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "whole", steps=20)


@pytest.mark.parametrize("name", ["plan.json", "result.json", "run.json", "record.jsonl", "audit.json"])
def test_what_holds_something_else_is_named(run: Path, name: str) -> None:
    # An empty record is that of a run that has recorded nothing yet.
    empty = [] if name == "record.jsonl" else ["\n"]
    for content in (*empty, "\x00\xff{ [", "[]", "3", '"text"', "{", "{}", '{"kind": NaN}'):
        (run / name).write_text(content + "\n", encoding="latin-1")
        assert read_run(run).missing[name].startswith("cannot be read ("), content


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("plan.json", "rows", [{"name": 3}], "rows.0.name: Input should be a valid string"),
        ("result.json", "metrics", {"test/loss": "low"}, "metrics.test/loss: Input should be a valid number"),
        ("run.json", "started", 1e300, "started: Input should be less than"),
        ("audit.json", "changed", "none", "changed: Input should be a valid integer"),
        ("record.jsonl", "step", 2**70, "line 1: is no line of a record (step: Input should be less than"),
        ("record.jsonl", "active", [1], "argument"),
    ],
)
def test_the_place_that_is_wrong_is_named(run: Path, name: str, key: str, value: object, reason: str) -> None:
    text = (run / name).read_text()
    first, *others = text.splitlines() if name == "record.jsonl" else [text]
    content = "\n".join([json.dumps({**json.loads(first), key: value}), *others])
    (run / name).write_text(content + "\n")
    assert reason in read_run(run).missing[name]


def test_a_sweep_shows_a_damaged_result_as_a_failed_job(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from rich.console import Console

    for number, accuracy in enumerate((0.5, 0.75, 0.25)):
        Result([f"seed={number}"], optimized=accuracy).save(tmp_path / f"{number}/result.json")
    (tmp_path / "1/result.json").write_bytes(b'{"overrides": [')
    results = collect(tmp_path)
    assert [result.status for result in results] == ["completed", "failed", "completed"]
    assert "1/result.json cannot be read" in results[1].error
    summary = SweepSummary(results)
    assert summary.best == 0
    summary.show(Console(width=400))
    summary.write(tmp_path / "summary.csv", Console())
    assert "1/result.json cannot be read" in capsys.readouterr().out
    with pytest.raises(PolicyError, match=r"1/result\.json cannot be read: .*EOF"):
        Result.load(tmp_path / "1/result.json")
