"""Panels and small files, for all pictures."""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image


def panel(
    axes: Axes, title: str, x_label: str = "x", y_label: str = "", baseline: bool = True, size: int = 9
) -> Axes:
    """Give a panel its title in this font size, its labels and a line at 0."""
    axes.set_title(title, fontsize=size)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=7)
    if baseline:
        axes.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save(picture: Figure | Image.Image, path: Path) -> None:
    """Save a picture; a figure with a palette, which keeps it small."""
    if isinstance(picture, Image.Image):
        picture.save(path, optimize=True)
        return
    raw = io.BytesIO()
    picture.savefig(raw, dpi=110, format="png")
    with Image.open(raw) as image:
        image.convert("RGB").quantize(colors=200).save(path, optimize=True)
