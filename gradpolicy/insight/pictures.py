"""Pictures of attributions: an image, the predicted class, and the attribution map."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

COLOURS = "RdBu_r"  # red supports the class, blue counts against it, white does neither
SCALE = Normalize(-1.0, 1.0)
RIGHT, WRONG, UNKNOWN = "#1a7f37", "#cf222e", "#24292f"
# The maximum length of a caption, in characters.
LONGEST = 44


@dataclass(frozen=True)
class Sample:
    """One image with its attribution and the model's prediction.

    Attributes:
        image: The image, of shape (channels, height, width) with 1 or 3 channels.
        attribution: The attribution, of the same shape.
        predicted: Name of the predicted class.
        probability: Its probability.
        truth: Name of the true class, if it is known.
        title: The name of the image, if it has one.
    """

    image: Tensor
    attribution: Tensor
    predicted: str
    probability: float
    truth: str | None = None
    title: str | None = None

    @property
    def caption(self) -> str:
        """The class and its probability, and the true class if the model is wrong."""
        title = f"{self.title}: " if self.title is not None else ""
        wrong = f"  (is {self.truth})" if self.truth not in (None, self.predicted) else ""
        return f"{title}{self.predicted}  {100 * self.probability:.0f} %{wrong}"

    @property
    def colour(self) -> str:
        """Green if the model is right, red if it is wrong."""
        if self.truth is None:
            return UNKNOWN
        return RIGHT if self.truth == self.predicted else WRONG


def displayable(image: Tensor) -> NDArray[np.float32]:
    """Return an image as (height, width, 3), rescaled to [0, 1] if values are outside."""
    pixels = image.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    return pixels.expand(3, *pixels.shape[-2:]).permute(1, 2, 0).numpy()


def relative(attribution: Tensor, percentile: float = 99.5) -> NDArray[np.float32]:
    """Return an attribution summed over the channels, as a share of its large magnitudes.

    Args:
        attribution: Shape (channels, height, width).
        percentile: The percentile of the magnitudes that becomes 1; larger values are clipped, so that single
            pixels do not dominate.

    Returns:
        Shape (height, width), from -1 to 1.
    """
    summed = attribution.detach().float().cpu().sum(dim=0).numpy()
    large = np.percentile(np.abs(summed), percentile) or np.abs(summed).max()
    return np.clip(summed / large, -1, 1) if large > 0 else summed


def overlay(image: Tensor, attribution: Tensor) -> NDArray[np.float32]:
    """Return the attribution in colour over the image in light grey, as (height, width, 3) in [0, 1]."""
    strength = relative(attribution)
    grey = displayable(image).mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    pale = 0.65 + 0.35 * grey
    colour = matplotlib.colormaps[COLOURS](SCALE(strength))[..., :3]
    share = np.sqrt(np.abs(strength))[..., None]
    return ((1 - share) * pale + share * colour).astype(np.float32)


def picture_grid(samples: Sequence[Sample], title: str, columns: int = 4) -> Figure:
    """Draw each image beside its attribution, with one colour scale for all of them.

    Args:
        samples: The samples, row by row.
        title: The title above the grid.
        columns: Samples in a row.

    Returns:
        A new figure; `figure.savefig` writes it.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("no samples to draw")
    columns = min(columns, len(samples))
    rows = -(-len(samples) // columns)
    size = (3.2 * columns + 0.4, 1.9 * rows + 1.3)
    figure = Figure(size, dpi=150, facecolor="white", layout="constrained")
    font = min(13.0, 115 * size[0] / max(1, len(title)))
    figure.suptitle(title, x=0.01, ha="left", size=font, weight="bold", color=UNKNOWN)
    places = figure.subplots(rows, 2 * columns, squeeze=False)
    for axes in places.flat:
        axes.set_axis_off()
    for sample, pair in zip(samples, places.reshape(-1, 2), strict=False):
        pictures = (displayable(sample.image), overlay(sample.image, sample.attribution))
        for axes, picture in zip(pair, pictures, strict=True):
            axes.imshow(picture, interpolation="nearest" if max(picture.shape) <= 64 else "antialiased")
        pair[0].set_title(sample.caption[:LONGEST], loc="left", fontsize=9, color=sample.colour)
    shrink = min(1.0, 3 / size[0])
    colours = ScalarMappable(SCALE, COLOURS)
    bar = figure.colorbar(colours, ax=places, location="bottom", shrink=shrink, aspect=25)
    bar.set_ticks([-1, 0, 1], labels=["against the class", "0", "for the class"], fontsize=8, color=UNKNOWN)
    return figure


def save_overlay(sample: Sample, path: Path, pixels: int = 448) -> None:
    """Write one overlay as a PNG; small images are enlarged by an integer factor to about `pixels` pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = Image.fromarray((overlay(sample.image, sample.attribution) * 255).round().astype(np.uint8))
    times = max(1, pixels // max(colours.size))
    size = (colours.width * times, colours.height * times)
    colours.resize(size, Image.Resampling.NEAREST).save(path)


def log_image(logger: Logger, name: str, path: Path, step: int, folder: str) -> None:
    """Log an image, if the logger supports images.

    Args:
        logger: One of Lightning's loggers.
        name: The name of the image in the logger.
        path: The image.
        step: The step.
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
