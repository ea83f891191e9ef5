"""The result of a run, and the printing of its config and results."""

import codecs
import io
import json
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.tree import Tree

from gradpolicy.errors import PolicyError
from gradpolicy.json_file import read_json

RESULT = "result.json"
STOPPED = "stopped before its end"
REPORT = "report.html"
UNENCODABLE = "gradpolicy.plain"
# Substitutes for characters that do not decompose into ASCII: one for one, so that tables keep their shape.
ASCII = dict(zip("–—−·•×→│─━", "---**x>|--", strict=True))


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        overrides: The overrides of the command line.
        metrics: The last value of each metric.
        optimized: The value that a sweep compares.
        status: ``"completed"``, ``"planned"``, ``"failed"``, or ``"stopped"`` if a signal or Ctrl-C ended it.
        error: The error, if it failed.
        directory: The run directory.
        program: The command that started the run.
        seconds: How long it took.
    """

    overrides: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    optimized: float | None = None
    status: str = "completed"
    error: str = ""
    directory: str = ""
    program: str = "python train.py"
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> "Result":
        """Read a result that :meth:`save` wrote.

        Raises:
            PolicyError: If it is absent, damaged, or something else.
        """
        try:
            return Result(**asdict(read_json(path, ResultFile)))
        except (OSError, ValueError) as error:
            raise PolicyError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ResultFile(Result):
    """The content of ``result.json``, in which some keys have no default."""

    overrides: list[str] = field()
    metrics: dict[str, float] = field()
    status: str = field()


class _ShortLists(yaml.SafeDumper):
    """Writes lists of plain values in one line."""

    def represent_list(self, data: list[Any]) -> yaml.SequenceNode:
        plain = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


_ShortLists.add_representer(list, _ShortLists.represent_list)


def print_config(config: Any, console: Console) -> None:
    """Print the composed config as a tree with a branch for each group."""
    tree = Tree("Config", guide_style="dim", style="bold")
    plain = {key: value for key, value in config.items() if not isinstance(value, dict)}
    groups = {key: value for key, value in config.items() if isinstance(value, dict) and value}
    for key, value in [("", plain), *groups.items()]:
        branch = tree.add(key) if key else tree
        text = yaml.dump(value, Dumper=_ShortLists, sort_keys=False, width=100).rstrip()
        branch.add(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print(tree)


def print_results(result: Result, optimized: str | None, report: Path, console: Console) -> None:
    """Print the last lines of a run: its main metrics, the time it took and where its report is.

    Args:
        result: The result. All its metrics are in the report.
        optimized: The metric by which runs are compared.
        report: The report. If it was not written, the directory of the run is named.
        console: Where to print.
    """
    lines = {name: f"{value:.4g}" for name, value in main_metrics(result.metrics, optimized).items()}
    lines["time"] = duration(result.seconds)
    lines |= (
        {"report": str(report.absolute())} if report.is_file() else {"run": str(report.parent.absolute())}
    )
    width = max(map(len, lines))
    console.print("Results", style="bold")
    for name, value in lines.items():
        # A path that is folded cannot be copied.
        console.print(f"  {name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def main_metrics(metrics: Mapping[str, float], optimized: str | None) -> dict[str, float]:
    """Choose the metrics that say how a run went: those of the test, or else of validation, or of training.

    The metric by which runs are compared is always among them.

    Example:
        >>> main_metrics({"train/loss": 0.1, "val/loss": 0.2, "val/loss_best": 0.15}, "val/loss_best")
        {'val/loss': 0.2, 'val/loss_best': 0.15}
    """
    for stage in ("test/", "val/", "train/", ""):
        chosen = sorted(name for name in metrics if name.startswith(stage) and not name.startswith("policy/"))
        if chosen:
            break
    return {name: metrics[name] for name in [*chosen, optimized or ""] if name in metrics}


def duration(seconds: float) -> str:
    """Write a time as a person does.

    Example:
        >>> duration(8.25), duration(75), duration(3725)
        ('8.2 s', '1 min 15 s', '1 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# ---- streams that lack characters


def replace_unencodable() -> None:
    """Write plain characters where the encoding of an output stream lacks one.

    Otherwise the first dash or ellipsis ends the program where, say, ``PYTHONIOENCODING=ascii`` is set.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=UNENCODABLE)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    decomposed = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return ASCII.get(character) or decomposed or "?"


codecs.register_error(UNENCODABLE, _plain)
