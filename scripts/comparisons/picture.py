"""A curve for each variant: the mean over seeds, and the range of them as a band."""

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from comparisons.families import Family
from comparisons.runs import Run

Curve = dict[int, float]


def read_curve(directory: Path, metric: str) -> Curve:
    """The values of a metric by step, from the newest CSV log of a run; empty where there is none."""
    logs = sorted(directory.glob("csv/*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return {}
    with logs[-1].open(newline="") as file:
        return {int(row["step"]): float(row[metric]) for row in csv.DictReader(file) if row.get(metric)}


def band(curves: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all curves have, with the mean, the least and the greatest value at each.

    Example:
        >>> band([{1: 1.0, 2: 4.0}, {2: 2.0}])
        ([2], [3.0], [2.0], [4.0])
    """
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = [[curve[step] for curve in curves] for step in steps]
    means = [sum(each) / len(each) for each in values]
    return steps, means, [min(each) for each in values], [max(each) for each in values]


def draw(family: Family, runs: Sequence[Run], path: Path) -> None:
    """Draws the family's curves of the finished runs."""
    metric, label = family.curve
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for variant in family.variants:
        own = [run for run in runs if run.variant == variant.name and run.result is not None]
        curves = [curve for run in own if (curve := read_curve(run.directory, metric))]
        if not curves:
            continue
        steps, means, low, high = band(curves)
        (line,) = axes.plot(steps, means, marker="o", markersize=2.5, linewidth=1.2, label=variant.name)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
