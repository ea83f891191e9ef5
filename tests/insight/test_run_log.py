"""The log of a run holds its tables, its warnings, and why it ended."""

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from gradpolicy.app.cli import replace_unencodable
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_log import logged_run, quieter, say


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file that Hydra's `job_logging` would open."""
    handler = logging.FileHandler(tmp_path / "train.log")
    logging.getLogger().addHandler(handler)
    yield tmp_path / "train.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def test_what_is_printed_and_warned_of_is_logged_as_plain_text(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("policy")
    table.add_row("[bold]random[/bold]")
    with quieter(), logged_run() as console:
        console.print(table)
        console.print("[/path]", markup=False)
        say("no frozen entry changed")
        line = warnings.formatwarning("no\n  value", UserWarning, "run.py", 1)
        logging.getLogger("lightning.pytorch").warning("of Lightning")
    assert line == "warning: no value\n"
    lines = log.read_text().splitlines()
    assert "│ random │" in lines
    assert lines[-4:] == ["[/path]", "no frozen entry changed", "warning: no value", "of Lightning"]
    out = capsys.readouterr().out
    assert "│ random │" in out
    assert out.count("no frozen entry changed") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PolicyError("seed: wrong"), "error: seed: wrong"),
        (KeyboardInterrupt(), "ended by KeyboardInterrupt"),
    ],
)
def test_the_error_that_ends_a_run_is_logged(log: Path, error: BaseException, said: str) -> None:
    with pytest.raises(type(error)), logged_run():
        raise error
    assert log.read_text().splitlines()[-1] == said


def test_other_ranks_print_and_log_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logged_run(first_rank=False) as console:
        console.print("plan")
    assert not capsys.readouterr().out
    assert not log.read_text()


def test_a_stream_that_lacks_a_character_prints_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    replace_unencodable()
    print("é – 1", flush=True)
    assert stream.buffer.getvalue() == b"? ? 1\n"
