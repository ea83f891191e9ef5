"""Draws the pictures of the first page."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from drawing.masks import PHASES, by_layer, masks, train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
# The rows of scripts/benchmarks/language_model.py that are drawn, and where the name of each goes.
METHODS = {
    "full": (-12, -4),
    "LoRA, r=8": (10, -4),
    "last four layers": (-10, -4),
    "random entries, 1 %": (-10, -4),
    "random rows, 1 %": (-10, -4),
    "layers in turn": (10, -4),
}


def what_trains() -> Figure:
    """Draw which layers of a small network train at each step, under four masks."""
    courses = {
        "Gradual(): from the last layer to the first": train(masks.Gradual(), epoch_of=7),
        "BlockCyclic(every=5): one layer at a time": train(masks.BlockCyclic(every=5)),
        "Layerwise(active=2, every=10): two at random": train(masks.Layerwise(active=2, every=10)),
        "Phases([…]): head, upper half, everything": train(masks.Phases(PHASES)),
    }
    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    for axes, (title, course) in zip(figure.subplots(2, 2).flat, courses.items(), strict=True):
        by_layer(axes, course, title, size=11)
        axes.tick_params(labelsize=9)
    return figure


def loss_against_memory() -> Figure:
    """Draw the loss of six methods against their memory, as the benchmark has measured them."""
    rows = json.loads(Path(__file__).with_name("language_model.json").read_text())["rows"]
    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("memory of a training step, MB", fontsize=10)
    axes.set_ylabel("loss on held-out text, nats", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for row in (each for each in rows if each["method"] in METHODS):
        name, x, y = row["method"], row["megabytes"], fmean(row["losses"])
        colour = "#0072B2" if name == "full" else "#009E73" if "LoRA" in name else "#D55E00"
        spread = [[y - min(row["losses"])], [max(row["losses"]) - y]]
        axes.errorbar(x, y, spread, fmt="o", markersize=9, capsize=4, color=colour)
        side = "left" if METHODS[name][0] > 0 else "right"
        options: dict[str, Any] = {"textcoords": "offset points", "fontsize": 11, "color": colour, "ha": side}
        axes.annotate(name, (x, y), METHODS[name], **options)
    axes.axhline(rows[0]["untrained"], color="0.5", linewidth=1, linestyle="--")
    axes.annotate(
        "not trained", (1500, rows[0]["untrained"]), (0, -14), textcoords="offset points", color="0.4"
    )
    axes.set_xlim(0, None)
    axes.tick_params(labelsize=9)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "what_trains": what_trains,
    "loss_against_memory": loss_against_memory,
}
