"""Pictures of a weight's mask, the ages of its entries, and their history."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.colors import Colormap, LinearSegmentedColormap
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from gradpolicy.checks import check_sizes
from gradpolicy.errors import under
from gradpolicy.insight.pictures import log_image
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.trainer_parts import callbacks_of
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.where import as_patterns, pick

ACTIVE = (9, 105, 218)  # blue: this entry trains
FROZEN = (223, 227, 232)  # pale grey: it is frozen
GAP = (255, 255, 255)  # white, between the kernels of a convolution
LARGEST = 384  # pixels on a side
MASK, AGE, HISTORY = "mask", "age", "history"
SHARES = LinearSegmentedColormap.from_list("shares", np.array([FROZEN, ACTIVE]) / 255)
AGES = matplotlib.colormaps["viridis"]


# ---- from tensors to images


def as_matrix(values: Tensor) -> NDArray[np.float32]:
    """Lay a tensor out in two dimensions; NaN marks the gaps between kernels.

    Args:
        values: A tensor of any shape. A vector becomes one row. In a convolution's weight, (out, in, …), each
            kernel becomes a tile: row = output channel, column = input channel. If the matrix is larger than
            a picture, tiles have no gaps.

    Returns:
        A matrix.

    Example:
        >>> as_matrix(torch.zeros(8)).shape, as_matrix(torch.zeros(4, 2, 3, 3)).shape
        ((1, 8), (15, 7))
    """
    array = values.detach().float().cpu().numpy()
    if array.ndim <= 2:
        return array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    tiles = array.reshape(*array.shape[:2], -1, array.shape[-1])
    rows, columns, height, width = tiles.shape
    gap = int(max(rows * (height + 1), columns * (width + 1)) <= LARGEST)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    matrix = tiles.transpose(0, 2, 1, 3).reshape(rows * (height + gap), columns * (width + gap))
    return matrix[: len(matrix) - gap, : matrix.shape[1] - gap]


def mask_image(mask: Tensor) -> Image.Image:
    """Draw a mask: blue = active, grey = frozen, a mixture if a pixel represents several entries.

    Args:
        mask: A bool tensor of the weight's shape, True = this entry trains.

    Returns:
        An image. Small weights are enlarged by an integer factor, large ones are averaged over blocks.
    """
    return _coloured(_shrunk(as_matrix(mask)), SHARES)


def age_image(ages: Tensor, mask: Tensor | None = None, oldest: int | None = None) -> Image.Image:
    """Draw the ages of a weight's entries, from dark (0) to bright (the oldest).

    Args:
        ages: Updates of each entry since its moments were last empty, in the weight's shape.
        mask: True = active; frozen entries are grey. None colours every entry. A pixel that represents
            several entries has the colour of the mean over the active ones.
        oldest: The age of the brightest colour; None: the maximum of `ages`.

    Returns:
        An image, as from :func:`mask_image`.
    """
    largest = max(int(ages.max()) if oldest is None else oldest, 1)
    active = torch.ones_like(ages, dtype=torch.bool) if mask is None else mask
    shares = _shrunk(as_matrix(active))
    sums = _shrunk(as_matrix(ages * active))
    means = np.divide(sums, shares * largest, out=np.zeros_like(sums), where=shares != 0)
    return _coloured(means, AGES, frozen=shares == 0)


def film_strip(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int = 6) -> Image.Image:
    """Join pictures in rows of at most `columns`, each with its caption below.

    Raises:
        ValueError: If there are no pictures, or not as many captions.
    """
    if not pictures or len(pictures) != len(captions):
        raise ValueError(f"{len(pictures)} pictures and {len(captions)} captions; need one or more of each")
    margin, text = 6, 14
    height = max(picture.height for picture in pictures) + text + margin
    width = max(*(picture.width for picture in pictures), 64) + margin
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    strip = Image.new("RGB", (columns * width + margin, rows * height + margin), "white")
    draw = ImageDraw.Draw(strip)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left = margin + index % columns * width
        top = margin + index // columns * height
        strip.paste(picture, (left, top))
        draw.text((left, top + picture.height), caption, fill="#24292f")
    return strip


def _shrunk(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a matrix, averaged over blocks if it is larger than a picture."""
    height, width = matrix.shape
    size = (min(width, LARGEST), min(height, LARGEST))
    return np.asarray(Image.fromarray(matrix).resize(size, Image.Resampling.BOX))


def _coloured(
    values: NDArray[np.float32], colours: Colormap, frozen: NDArray[np.bool_] | None = None
) -> Image.Image:
    """Return values from 0 to 1 as an image in colours; NaN is a gap."""
    pixels = (colours(values)[..., :3] * 255).round().astype(np.uint8)
    if frozen is not None:
        pixels[frozen] = FROZEN
    pixels[np.isnan(values)] = GAP
    image = Image.fromarray(pixels)
    times = max(1, min(12, LARGEST // 2 // max(image.size)))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


# ---- during a run


class MaskPictures(Callback):
    """Draws the masks of a few weights and the ages of their entries at every n-th change.

    For each weight a folder gets ``mask_<step>.png`` and ``age_<step>.png``, and at the end of training the
    film strips ``history_mask.png`` and ``history_age.png``. They are logged as ``masks/<weight>/…``, if the
    logger supports images. When a weight has `frames` pictures, every second one is deleted, and from then on
    half as many are drawn, which limits their number.

    The first rank draws. Sharded weights have no pictures, and neither have weights that train or freeze as a
    whole only: the record has all information.

    Args:
        every: The number of changes of a weight's mask between pictures.
        params: Globs on the names of parameters of freeze policies.
        count: The maximum number of weights; those with two or more dimensions are preferred.
        frames: The maximum number of pictures of a weight.
        directory: The directory of the PNGs; default: ``masks`` in the trainer's root directory.

    Raises:
        PolicyError: If a number is too small; when training starts, if `params` matches nothing.
    """

    def __init__(
        self,
        every: int = 10,
        params: str | Sequence[str] = "*",
        count: int = 4,
        frames: int = 12,
        directory: str | Path | None = None,
    ) -> None:
        check_sizes("MaskPictures", every=every, count=count, frames=frames)
        self.every = every
        self.params = as_patterns(params)
        self.count = count
        self.frames = max(frames, 2)
        self.directory = Path(directory) if directory is not None else None
        self._folder = Path()
        self._policies: GradientPolicies | None = None
        # The parameters that may be drawn, and those that are drawn, by name.
        self._candidates: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        # The mask of each weight after the last batch.
        self._masks: dict[str, Any] = {}
        # The changes of each weight's mask so far, and the changes between pictures.
        self._changes: dict[str, int] = {}
        self._intervals: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the candidate weights; a resumed run deletes pictures of steps that it repeats."""
        found = [each for each in callbacks_of(trainer, GradientPolicies) if each.freezer]
        self._candidates, self._weights, self._masks = {}, {}, {}
        if not found or not trainer.is_global_zero:
            return
        self._policies = found[0]
        self._folder = self.directory or Path(trainer.default_root_dir) / "masks"
        freezer = self._policies.freezer
        with under("MaskPictures.params"):
            matched = pick(freezer.parameters, self.params) if freezer is not None else {}
        whole = [name for name, parameter in matched.items() if not is_sharded(parameter)]
        # Sorting keeps the order of the parameters.
        ordered = sorted(whole, key=lambda name: matched[name].dim() < 2)
        self._candidates = {name: matched[name] for name in ordered}
        self._weights = {name: matched[name] for name in ordered if name in self._changes}
        for name in self._candidates:
            for path in _frames(self._folder / name):
                if _step_of(path) > trainer.global_step:
                    path.unlink()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Draw the masks that are due."""
        freezer = self._policies.freezer if self._policies is not None else None
        if freezer is None:
            return
        for name, parameter in self._candidates.items():
            if len(self._weights) < self.count and not isinstance(freezer.mask_of(name), bool):
                self._weights.setdefault(name, parameter)
        for name in self._weights:
            mask = freezer.mask_of(name)
            # A new mask is a new object; a mask with the same entries is not set again.
            if mask is self._masks.get(name):
                continue
            self._masks[name] = mask
            changes = self._changes.get(name, 0)
            self._changes[name] = changes + 1
            if changes % self._intervals.setdefault(name, self.every) == 0:
                self._draw(trainer, name)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the film strips."""
        for name in self._weights:
            for kind in (MASK, AGE):
                if paths := _frames(self._folder / name, kind):
                    captions = [f"step {_step_of(path):,}" for path in paths]
                    strip = film_strip([Image.open(path) for path in paths], captions)
                    path = self._folder / name / f"{HISTORY}_{kind}.png"
                    self._save(trainer, strip, path, label=path.stem)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of changes of masks, and the changes between pictures."""
        return {"changes": self._changes, "intervals": self._intervals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._changes = dict(state_dict["changes"])
        self._intervals = dict(state_dict["intervals"])

    def _draw(self, trainer: Trainer, name: str) -> None:
        assert self._policies is not None
        parameter = self._weights[name]
        optimizers = self._policies.masked_optimizers
        optimizer = next(each for each in optimizers if parameter in each.masked_parameters())
        mask = optimizer.get_mask(parameter).expand(parameter.shape)
        ages = optimizer.age(parameter).expand(parameter.shape)
        for kind, picture in ((MASK, mask_image(mask)), (AGE, age_image(ages, mask))):
            path = self._folder / name / f"{kind}_{trainer.global_step:09d}.png"
            self._save(trainer, picture, path, label=kind)
            paths = _frames(self._folder / name, kind)
            if len(paths) > self.frames:
                for path in paths[1::2]:
                    path.unlink()
                self._intervals[name] *= 2 if kind == AGE else 1

    def _save(self, trainer: Trainer, picture: Image.Image, path: Path, *, label: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # More compression gains little, and takes twice as long.
        picture.save(path, compress_level=1)
        folder = f"masks/{path.parent.name}"
        for logger in trainer.loggers:
            log_image(logger, f"{folder}/{label}", path, trainer.global_step, folder)


def _step_of(path: Path) -> int:
    """Return the step in the name of a picture."""
    return int(path.stem.rpartition("_")[2])


def _frames(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{kind}_[0-9]*.png"))
