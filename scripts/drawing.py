"""What the programs that draw pictures share: a command line that names them, panels, and small files."""

import argparse
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from gradpolicy.errors import nearest


def draw(pictures: Mapping[str, Callable[[], Figure]], folder: Path, description: str | None) -> None:
    """Draws the pictures that the command line names, all unless it names some."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which pictures; all unless told: {', '.join(pictures)}")
    parser.add_argument("--folder", type=Path, default=folder)
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in pictures:
            parser.error(f"unknown picture {name!r}; {nearest(name, pictures)}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["font.family"] = "DejaVu Sans"
    for name in chosen.names or pictures:
        path = chosen.folder / f"{name}.png"
        save(pictures[name](), path)
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


def panel(
    axes: Axes, title: str, x_label: str = "x", y_label: str = "", baseline: bool = True, size: int = 9
) -> Axes:
    """Gives a panel its title in this font size, its labels and a line at 0."""
    axes.set_title(title, fontsize=size)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=7)
    if baseline:
        axes.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save(figure: Figure, path: Path) -> None:
    """Saves a picture with a palette, which keeps it small."""
    raw = io.BytesIO()
    figure.savefig(raw, dpi=110, format="png")
    with Image.open(raw) as image:
        image.convert("RGB").quantize(colors=200).save(path, optimize=True)
