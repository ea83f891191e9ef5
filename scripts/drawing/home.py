"""Draws the pictures of the first page."""

import re
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from drawing.masks import PHASES, by_layer, masks, train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
# The rows of the comparison in docs/masks/README.md that are drawn, and where the name of each goes.
METHODS = {
    "full": (-12, -4),
    "LIFT, 10 %": (-10, -12),
    "random entries, 10 %": (-10, 2),
    "LoRA, r = 8 (`peft`)": (10, -4),
    "random rows, 10 %": (-8, 8),
    "biases (BitFit)": (10, -4),
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
    """Draw the loss of six methods against their optimizer state, as the comparison states them."""
    text = (ROOT / "docs" / "masks" / "README.md").read_text()
    found = re.findall(r"^\| (.+) \| ([\d.]+) ± ([\d.]+) \|.+\| ([\d.]+) \|$", text, flags=re.MULTILINE)
    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("optimizer state, MB", fontsize=10)
    axes.set_ylabel("test loss, nats", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for name, loss, spread, megabytes in (row for row in found if row[0] in METHODS):
        x, y = float(megabytes), float(loss)
        colour = "#0072B2" if name == "full" else "#009E73" if "LoRA" in name else "#D55E00"
        axes.errorbar(x, y, float(spread), fmt="o", markersize=9, capsize=4, color=colour)
        right = METHODS[name][0] > 0
        axes.annotate(
            name.replace("`", ""),
            (x, y),
            METHODS[name],
            textcoords="offset points",
            fontsize=11,
            color=colour,
            ha="left" if right else "right",
        )
    axes.set_xscale("log")
    axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"])
    axes.tick_params(labelsize=9)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "what_trains": what_trains,
    "loss_against_memory": loss_against_memory,
}
