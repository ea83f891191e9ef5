"""Draws the pictures of the first page."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from drawing.masks import PHASES, by_layer, masks, train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"


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


PICTURES: dict[str, Callable[[], Figure]] = {"what_trains": what_trains}
