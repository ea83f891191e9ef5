"""The log of a run holds what the run printed, and why it ended, but no progress bars."""

import io
import sys
import warnings
from pathlib import Path

import pytest
from rich.progress import track
from rich.table import Table
from tqdm import tqdm

from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_log import kept_output, quieter


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def talk(path: Path) -> None:
    """Prints a table, text in colour, a warning, and, while bars are drawn, more text."""
    table = Table("policy")
    table.add_row("[bold]random[/bold]")
    with kept_output(path) as console:
        console.print(table)
        print("\x1b[31mred\x1b[0m")
        for _ in track(range(3), description="Epoch"):
            print("under the bar")
        for _ in tqdm(range(3), desc="Testing"):
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
            warnings.warn("careful", stacklevel=1)


def fail(path: Path, name: str, error: BaseException) -> None:
    with kept_output(path):
        print(name)
        raise error


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_is_printed_is_kept_without_colours_and_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", stream())
    talk(tmp_path / "new" / "train.log")
    assert sys.stdout is out
    assert "Epoch" in out.getvalue()
    lines = (tmp_path / "new" / "train.log").read_text().split("\n")
    assert "│ random │" in lines
    assert lines.count("under the bar") == 3
    assert {"red", "careful"} <= set(lines)
    assert not any(bar in line for line in lines for bar in ("Epoch", "Testing", "\x1b", "\r"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PolicyError("seed: wrong"), "error: seed: wrong"),
        (ArithmeticError("on purpose"), "ArithmeticError: on purpose"),
        (KeyboardInterrupt(), "ended by KeyboardInterrupt"),
    ],
)
def test_the_error_that_ends_a_run_is_kept_and_a_second_run_is_added(
    tmp_path: Path, error: BaseException, said: str
) -> None:
    path = tmp_path / "train.log"
    for name in ("first", "second"):
        with pytest.raises(type(error)):
            fail(path, name, error)
    lines = path.read_text().splitlines()
    assert lines[0] == "first"
    assert "second" in lines
    assert lines.count(said) == 2


def test_other_ranks_print_no_tables_and_write_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept_output(tmp_path / "train.log", keeps=False) as console:
        console.print("plan")
    assert not capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_warning_is_one_line_without_its_place_in_the_code() -> None:
    before = warnings.formatwarning
    with quieter():
        line = warnings.formatwarning("no\n  value", UserWarning, "run.py", 1)
    assert line == "warning: no value\n"
    assert warnings.formatwarning is before
