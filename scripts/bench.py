"""Runs benchmarks: ``python scripts/bench.py NAME ...`` prints tables and writes JSON files.

Every figure is a ratio to a baseline that was timed alternately in the same run. Without a name, the
benchmarks are listed.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.measure import Row
from gradpolicy.errors import PolicyError, unknown

Benchmark = Callable[[], list[Row]]
SPANS = {"95 %": ("at_least", "at_most"), "quartiles": ("low", "high")}
NUMBERS = {
    "fastest": "fastest",
    "target": "target",
    "ms": "milliseconds",
    "baseline ms": "baseline_milliseconds",
}


def discover() -> dict[str, Benchmark]:
    """Return every benchmark of the files in ``scripts/benchmarks``."""
    found: dict[str, Benchmark] = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        found |= getattr(importlib.import_module(f"benchmarks.{module.name}"), "BENCHMARKS", {})
    return found


def table(name: str, rows: list[Row]) -> Table:
    """Return the rows as a table; a ratio is green within its target, red above it, yellow if unclear."""
    drawn = Table(title=f"{name} (ratio to a baseline timed in turn)", title_justify="left")
    drawn.add_column("what", overflow="fold")
    for heading in ("ratio", "unit", *SPANS, *NUMBERS):
        drawn.add_column(heading, justify="right")
    for row in rows:
        spans = (f"{row[low]:.3f}–{row[high]:.3f}" if low in row else "" for low, high in SPANS.values())
        numbers = ("" if row.get(key) is None else f"{row[key]:.3g}" for key in NUMBERS.values())
        drawn.add_row(row["what"], f"[{_colour(row)}]{row['ratio']:.3f}[/]", row["unit"], *spans, *numbers)
    return drawn


def _colour(row: Row) -> str:
    target, ratio = row.get("target"), row["ratio"]
    if target is None:
        return "default"
    if row.get("at_least", ratio) <= target < row.get("at_most", ratio):
        return "yellow"
    return "green" if ratio <= target else "red"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the given benchmarks, or list all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="the folder of the JSON files"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        os.environ["GRADPOLICY_BENCH_QUICK"] = "1"
    console, found = Console(width=None if sys.stdout.isatty() else 150), discover()
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
    }
    if not parsed.names:
        console.print("Benchmarks: " + ", ".join(sorted(found)))
    try:
        for name in parsed.names:
            if name not in found:
                raise unknown("benchmark", name, found)
        for name in parsed.names:
            rows = found[name]()
            console.print(table(name, rows))
            path = parsed.out / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"benchmark": name, "machine": machine, "rows": rows}, indent=2) + "\n"
            )
            console.print(f"written to {path}")
    except PolicyError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
