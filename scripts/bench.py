"""The one place for benchmarks: ``python scripts/bench.py NAME`` prints a table and writes JSON.

Every figure is a ratio against a baseline that was taken in turn in the same run.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Ctrl-C while the rest is imported: nothing has begun, so there is nothing to say.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
from rich.console import Console
from rich.table import Table

import benchmarks
from gradpolicy.errors import PolicyError, unknown

Benchmark = Callable[[], list[dict[str, Any]]]


def discover() -> dict[str, Benchmark]:
    """Finds every benchmark of the files in ``scripts/benchmarks``."""
    found: dict[str, Benchmark] = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        found |= getattr(importlib.import_module(f"benchmarks.{module.name}"), "BENCHMARKS", {})
    return found


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "cpu",
    }


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    """Lays the rows out, the ratio beside its target."""
    drawn = Table(title=f"{name} (ratio to a baseline taken in turn)", title_justify="left")
    drawn.add_column("what", overflow="fold")
    for heading in (
        "ratio",
        "95 %",
        "quartiles",
        "fastest",
        "target",
        "unit",
        "ms",
        "baseline ms",
    ):
        drawn.add_column(heading, justify="right")
    for row in rows:
        target = row.get("target")
        colour = "" if target is None else _colour(row, target)
        drawn.add_row(
            str(row["what"]),
            f"[{colour}]{row['ratio']:.3f}[/]" if colour else f"{row['ratio']:.3f}",
            _span(row, "at_least", "at_most"),
            _span(row, "low", "high"),
            f"{row['fastest']:.3f}" if "fastest" in row else "",
            "" if target is None else f"≤ {target:g}",
            str(row.get("unit", "")),
            f"{row['milliseconds']:.2f}" if "milliseconds" in row else "",
            f"{row['baseline_milliseconds']:.2f}" if "baseline_milliseconds" in row else "",
        )
    return drawn


def _colour(row: dict[str, Any], target: float) -> str:
    """Green within the target, red beyond it, yellow where the measurement cannot tell."""
    if row.get("at_least", row["ratio"]) <= target < row.get("at_most", row["ratio"]):
        return "yellow"
    return "green" if row["ratio"] <= target else "red"


def _span(row: dict[str, Any], low: str, high: str) -> str:
    return f"{row[low]:.3f}–{row[high]:.3f}" if low in row else ""


def parse(arguments: list[str], valid: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or several of: {', '.join(valid)}")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="the folder for the JSON files"
    )
    parsed = parser.parse_args(arguments)
    for name in parsed.names:
        if name not in valid:
            raise unknown("benchmark", name, valid)
    return parsed


def main(arguments: list[str]) -> int:
    """Runs the benchmarks that were named, or lists them."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    found = discover()
    try:
        parsed = parse(arguments, sorted(found))
    except PolicyError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if not parsed.names:
        console.print("Benchmarks: " + ", ".join(sorted(found)))
        return 0
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name in parsed.names:
        rows = found[name]()
        console.print(table(name, rows))
        path = parsed.out / f"{name}.json"
        path.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": rows}, indent=2) + "\n")
        console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
