"""Prints the config before a run, and its results after it."""

import codecs
import io
import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.tree import Tree

from gradpolicy.errors import PolicyError
from gradpolicy.insight.file_models import ResultFile
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
        overrides: What the command line set.
        metrics: The last value of each metric.
        optimized: The value that a sweep compares.
        status: ``"completed"``, ``"planned"``, ``"failed"``, or ``"stopped"`` if a signal or Ctrl-C ended it.
        error: What was wrong, if it failed.
        directory: Where everything was saved.
        program: How the program is called that did the run.
    """

    overrides: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    optimized: float | None = None
    status: str = "completed"
    error: str = ""
    directory: str = ""
    program: str = "python train.py"

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> "Result":
        """Reads what :meth:`save` wrote.

        Raises:
            PolicyError: If it is absent, damaged, or something else.
        """
        try:
            return Result(**read_json(path, ResultFile).model_dump())
        except (OSError, ValueError) as error:
            raise PolicyError(f"{path} cannot be read: {error}") from error


class _ShortLists(yaml.SafeDumper):
    """Writes lists of plain values in one line."""

    def represent_list(self, data: list[Any]) -> yaml.SequenceNode:
        plain = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


_ShortLists.add_representer(list, _ShortLists.represent_list)


def print_config(config: Any, console: Console) -> None:
    """Prints the composed config as a tree with a branch for each group."""
    tree = Tree("Config", guide_style="dim", style="bold")
    plain = {key: value for key, value in config.items() if not isinstance(value, dict)}
    groups = {key: value for key, value in config.items() if isinstance(value, dict) and value}
    for key, value in [("", plain), *groups.items()]:
        branch = tree.add(key) if key else tree
        text = yaml.dump(value, Dumper=_ShortLists, sort_keys=False, width=100).rstrip()
        branch.add(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print(tree)


def print_results(result: Result, saved: Mapping[str, str], console: Console) -> None:
    """Prints the final table and where everything was saved."""
    table = Table(title="Results", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in sorted(result.metrics.items(), key=_by_stage):
        table.add_row(escape(name), f"{value:.4g}")
    console.print(table)
    table = Table(title="Saved", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, where in saved.items():
        table.add_row(what, escape(where))
    console.print(table)


def saved_in(directory: Path) -> dict[str, str]:
    """Lists what a run left in its directory, a line for each kind."""
    kinds = {
        "run": [directory],
        "config": [directory / "config.yaml"],
        "checkpoints": sorted(directory.glob("checkpoints/*")),
        "metrics": sorted(directory.glob("csv/*/metrics.csv"))[-1:],
        "wandb": sorted(directory.glob("wandb/*run-*"))[-1:],
        "tensorboard": sorted(directory.glob("tensorboard/*"))[-1:],
        "mlflow": sorted(directory.glob("mlflow.db")),
        "pictures": sorted(directory.glob("pictures/*")),
        "delta": [directory / "delta.safetensors"],
        "log": [directory / "train.log"],
        "report": [directory / REPORT],
    }
    return {
        what: ", ".join(str(path) if what == "run" else str(path.relative_to(directory)) for path in paths)
        for what, paths in kinds.items()
        if any(path.exists() for path in paths)
    }


def write_report(runs: Sequence[Path], output: Path, console: Console) -> None:
    """Writes the report of one run or of several; if that fails, a line says so, and the run goes on.

    Args:
        runs: The directories of the runs.
        output: Where the report goes.
        console: Where to print.
    """
    # Plotting takes a while to import.
    from gradpolicy.insight.report import write

    try:
        write(runs, output)
    except Exception as error:
        text = " ".join(str(error).split())
        console.print(f"warning: no report: {type(error).__name__}: {text}", markup=False, soft_wrap=True)


def _by_stage(item: tuple[str, float]) -> tuple[int, str]:
    """The sort key of a metric: test first, then validation, training, and the policies' own."""
    stages = ("test/", "val/", "train/")
    name = item[0]
    return next((index for index, stage in enumerate(stages) if name.startswith(stage)), len(stages)), name


# ---- streams that lack characters


def replace_unencodable() -> None:
    """Writes plain characters where the encoding of an output stream lacks one.

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
