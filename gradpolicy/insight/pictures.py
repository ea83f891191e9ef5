"""Pictures of attributions: what the network saw, what it said, and which pixels spoke for it."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo
from rich.markup import escape
from torch import Tensor

COLOURS = "RdBu_r"  # red speaks for the class, blue against it, white for neither
SCALE = Normalize(-1.0, 1.0)
# What a PNG says made it.
MARK = "gradpolicy"
RIGHT, WRONG, UNKNOWN = "#1a7f37", "#cf222e", "#24292f"


@dataclass(frozen=True)
class Sample:
    """One image with its attribution and what the model said.

    Attributes:
        image: Shape (channels, height, width) with 1 or 3 channels.
        attribution: The same shape.
        predicted: Name of the predicted class.
        probability: Its probability.
        truth: Name of the true class, where it is known.
        title: What to call the image, where it has a name.
    """

    image: Tensor
    attribution: Tensor
    predicted: str
    probability: float
    truth: str | None = None
    title: str | None = None

    @property
    def caption(self) -> str:
        """The class and its probability, and the true class where the model is wrong."""
        said = f"{self.predicted}  {percent(self.probability)}"
        return said if self.truth in (None, self.predicted) else f"{said}  (is {self.truth})"

    @property
    def colour(self) -> str:
        """Green where the model is right, red where it is wrong."""
        if self.truth is None:
            return UNKNOWN
        return RIGHT if self.truth == self.predicted else WRONG

    def __rich__(self) -> str:
        """Renders the caption: a terminal shows no picture."""
        return escape(self.caption)

    def _repr_html_(self) -> str:
        """Renders the overlay above its caption, for a notebook."""
        written = io.BytesIO()
        enlarged_overlay(self, pixels=224).save(written, format="png")
        picture = base64.b64encode(written.getvalue()).decode()
        caption = html.escape(self.caption)
        return (
            f'<figure><img src="data:image/png;base64,{picture}" alt="{caption}"/>'
            f'<figcaption style="color: {self.colour}">{caption}</figcaption></figure>'
        )


def percent(probability: float) -> str:
    """A probability as a person writes it; never 100 % unless it is 1.

    Example:
        >>> percent(0.99963), percent(0.423)
        ('>99 %', '42 %')
    """
    if 0.995 <= probability < 1:
        return ">99 %"
    return "<1 %" if 0 < probability < 0.005 else f"{probability:.0%}".replace("%", " %")


def displayable(image: Tensor) -> NDArray[np.float32]:
    """An image as (height, width, 3) in [0, 1]; values outside are brought there linearly."""
    pixels = image.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    return pixels.expand(3, *pixels.shape[-2:]).permute(1, 2, 0).numpy()


def relative(attribution: Tensor, percentile: float = 99.5) -> NDArray[np.float32]:
    """An attribution summed over the channels, as a share of its large magnitudes.

    Args:
        attribution: Shape (channels, height, width).
        percentile: Which percentile of the magnitudes becomes 1; beyond it values are cut off, so that single
            pixels do not pale the rest.

    Returns:
        Shape (height, width), from -1 to 1.
    """
    summed = attribution.detach().float().cpu().sum(dim=0).numpy()
    large = np.percentile(np.abs(summed), percentile) or np.abs(summed).max()
    return np.clip(summed / large, -1, 1) if large > 0 else summed


def overlay(image: Tensor, attribution: Tensor) -> NDArray[np.float32]:
    """The attribution in colour over the image in pale grey, as (height, width, 3) in [0, 1]."""
    strength = relative(attribution)
    grey = displayable(image).mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    pale = 0.65 + 0.35 * grey
    colour = matplotlib.colormaps[COLOURS](SCALE(strength))[..., :3]
    share = np.sqrt(np.abs(strength))[..., None]
    return ((1 - share) * pale + share * colour).astype(np.float32)


def picture_grid(samples: Sequence[Sample], title: str, columns: int = 4) -> Figure:
    """Draws each image beside its attribution, with one colour scale for all of them.

    Args:
        samples: What to draw, row by row.
        title: Above the grid.
        columns: Samples in a row.

    Returns:
        A figure of its own; `figure.savefig` writes it.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("no samples to draw")
    columns = min(columns, len(samples))
    rows = -(-len(samples) // columns)
    head, foot = 0.55, 0.75  # inches
    width, height = 3.2 * columns + 0.4, 1.9 * rows + head + foot
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.2 / width,
        right=1 - 0.2 / width,
        top=1 - (head + 0.25) / height,
        bottom=foot / height,
        wspace=0.1,
        hspace=0.22,
    )
    for index, sample in enumerate(samples):
        pair = grid[index].subgridspec(1, 2, wspace=0.04)
        _draw(sample, figure.add_subplot(pair[0]), figure.add_subplot(pair[1]))
    size = min(13.0, 115 * width / max(1, len(title)))
    figure.text(0.2 / width, 1 - 0.17 / height, title, va="top", size=size, weight="bold", color=UNKNOWN)
    _add_scale(figure, width, height)
    return figure


def save_overlay(sample: Sample, path: Path, pixels: int = 448) -> None:
    """Writes one overlay as a PNG, enlarged as by :func:`enlarged_overlay`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = PngInfo()
    mark.add_text("Software", MARK)
    enlarged_overlay(sample, pixels).save(path, pnginfo=mark)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG that says who made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": MARK})


def log_image(logger: Logger, name: str, path: Path, step: int, folder: str) -> None:
    """Give an image to a logger, if it is one that takes images.

    Args:
        logger: One of Lightning's loggers.
        name: The name of the image in the logger.
        path: The image.
        step: The step that it belongs to.
        folder: The folder among MLflow's artifacts.
    """
    if isinstance(logger, WandbLogger):
        logger.log_image(name, [str(path)], step=step)
    elif isinstance(logger, TensorBoardLogger):
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        logger.experiment.add_image(name, pixels, step, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(path), folder)


def is_own_picture(path: Path) -> bool:
    """Whether a file is a PNG of :func:`save_overlay` or :func:`save_figure`."""
    try:
        with Image.open(path) as picture:
            return picture.info.get("Software") == MARK
    except (OSError, UnidentifiedImageError):
        return False


def enlarged_overlay(sample: Sample, pixels: int) -> Image.Image:
    """One overlay, with small images enlarged in whole steps to about `pixels` pixels."""
    colours = Image.fromarray((overlay(sample.image, sample.attribution) * 255).round().astype(np.uint8))
    times = max(1, pixels // max(colours.size))
    return colours.resize((colours.width * times, colours.height * times), Image.Resampling.NEAREST)


def _draw(sample: Sample, left: Axes, right: Axes) -> None:
    for axes, picture in (
        (left, displayable(sample.image)),
        (right, overlay(sample.image, sample.attribution)),
    ):
        axes.imshow(picture, interpolation="nearest" if max(picture.shape) <= 64 else "antialiased")
        axes.set_xticks([])
        axes.set_yticks([])
        for edge in axes.spines.values():
            edge.set_color("#d0d7de")
    caption = sample.caption if sample.title is None else f"{sample.title}: {sample.caption}"
    left.set_title(_at_most(caption, 44), loc="left", fontsize=9, pad=4, color=sample.colour)


def _at_most(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _add_scale(figure: Figure, width: float, height: float) -> None:
    """The colour scale, at the bottom, of a fixed size."""
    length = min(3.0, 0.5 * width)
    axes = figure.add_axes(((0.5 * (width - length)) / width, 0.38 / height, length / width, 0.12 / height))
    bar = figure.colorbar(ScalarMappable(SCALE, COLOURS), cax=axes, orientation="horizontal")
    bar.set_ticks([-1, 0, 1], labels=["against the class", "0", "for the class"], fontsize=8, color=UNKNOWN)
    bar.outline.set_visible(False)
