"""The report program finds runs, writes the file, and says in one line what is wrong with its input."""

import os
import re
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from gradpolicy.app import cli


def main(arguments: list[str]) -> int:
    """The command, as `gradpolicy report` runs it."""
    return cli.main(["report", *arguments])


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two run directories below one folder, and what Hydra keeps in one of them."""
    found = [tmp_path / "multiruns" / name for name in ("0", "1")]
    for path in found:
        (path / ".hydra").mkdir(parents=True)
        (path / ".hydra" / "config.yaml").write_text("seed: 1\n")
        (path / "config.yaml").write_text(f"seed: {path.name}\n")
    return found


def test_last_is_the_newest_run(runs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outputs = (tmp_path / "multiruns").rename(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    os.utime(outputs / "0/config.yaml", (2e9, 2e9))
    assert main(["last"]) == 0
    assert [path.parent.name for path in outputs.rglob("report.html")] == ["0"]


def test_one_run_gets_its_report_in_its_directory(runs: list[Path]) -> None:
    assert main([str(runs[0])]) == 0
    assert main([str(runs[0])]) == 0
    assert "seed 0" in (runs[0] / "report.html").read_text()


def test_a_folder_stands_for_the_runs_in_it(runs, tmp_path: Path, monkeypatch) -> None:
    write = Mock()
    monkeypatch.setattr("gradpolicy.insight.report.write", write)
    assert main([str(tmp_path / "multiruns")]) == 0
    assert main([*map(str, runs), str(runs[0])]) == 0
    assert main([str(runs[1]), "--output", str(tmp_path / "other.html")]) == 0
    both = call(runs, tmp_path / "multiruns" / "report.html")
    assert write.call_args_list == [both, both, call(runs[1:], tmp_path / "other.html")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([each], f"RUN: {each} is no run") for each in ("multirun", "multiruns/0/config.yaml", "empty")),
        (["multiruns/0", "--output", "empty"], "--output: .* is there already and is no report"),
        (["multiruns/0", "--output", "thesis.html"], "--output: .* is there already and is no report"),
    ],
)
def test_wrong_input_is_refused(runs, arguments, message, tmp_path, monkeypatch, refusal) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis.html").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert re.match(message, refusal("report", *arguments))
    assert (tmp_path / "thesis.html").read_text() == "mine"
