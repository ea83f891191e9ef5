"""Pictures of masks: a weight's mask as an image, the ages of its entries, its history as a film strip."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from gradpolicy.checks import check_sizes
from gradpolicy.errors import under
from gradpolicy.insight.pictures import log_image
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.mask import Mask, as_tensor
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.where import as_patterns, pick

ACTIVE = (9, 105, 218)  # blue: this entry trains
FROZEN = (223, 227, 232)  # pale grey: it is frozen
GAP = (255, 255, 255)  # white, between the kernels of a convolution
AGES = "viridis"
LARGEST = 384  # pixels on a side
MASK, AGE, HISTORY = "mask", "age", "history"

# Colours by the number of a pixel: gap, frozen, then from the first to the last of a scale.
_GAP, _FROZEN, _FIRST, _LAST = 0, 1, 2, 255
_SHARES = np.linspace(FROZEN, ACTIVE, _LAST - _FIRST + 1)
_VIRIDIS = 255 * matplotlib.colormaps[AGES](np.linspace(0, 1, _LAST - _FIRST + 1))[:, :3]


# ---- from tensors to images


def as_matrix(values: Tensor) -> NDArray[np.float32]:
    """Lays a tensor out in two dimensions; NaN marks the gaps between kernels.

    Args:
        values: Any shape. A vector becomes one row. Of a convolution's weight, (out, in, …), each kernel
            becomes a tile: row = output channel, column = input channel. Where there are many more rows than
            columns, parts of them stand side by side. Where the whole is larger than a picture, tiles have
            no gaps.

    Returns:
        Shape (rows, columns).

    Example:
        >>> as_matrix(torch.zeros(8)).shape, as_matrix(torch.zeros(4, 2, 3, 3)).shape
        ((1, 8), (15, 7))
        >>> as_matrix(torch.zeros(32, 1, 3, 3)).shape  # six columns of filters
        (23, 23)
    """
    array = values.detach().float().cpu().numpy()
    if array.ndim <= 2:
        return array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    rows, columns = array.shape[:2]
    tiles = array.reshape(rows, columns, -1, array.shape[-1])
    height, width = rows * (tiles.shape[2] + 1), columns * (tiles.shape[3] + 1)
    if max(height, width) > LARGEST:
        return _joined(tiles)
    # A row and a column more for each kernel, of which the last are cut off.
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    parts = max(1, round((height / width) ** 0.5))
    tiles = np.pad(tiles, ((0, -rows % parts), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
    side_by_side = [_joined(part) for part in np.split(tiles, parts)]
    return np.concatenate(side_by_side, axis=1)[:-1, :-1]


def _joined(tiles: NDArray[np.float32]) -> NDArray[np.float32]:
    """Tiles of shape (rows, columns, height, width) as one matrix."""
    rows, columns, height, width = tiles.shape
    return tiles.transpose(0, 2, 1, 3).reshape(rows * height, columns * width)


def mask_image(mask: Tensor) -> Image.Image:
    """A mask as an image: blue = active, grey = frozen, a mixture where a pixel stands for many entries.

    Args:
        mask: A bool tensor of the weight's shape, True = this entry trains.

    Returns:
        An image with a palette. Small weights are enlarged by a whole factor, large ones shrunk by means.
    """
    shares = _shrunk(as_matrix(mask))
    return _coloured(_on_scale(shares), np.isnan(shares), _SHARES)


def age_image(ages: Tensor, mask: Tensor | None = None, oldest: int | None = None) -> Image.Image:
    """The ages of a weight's entries as an image, from dark (0) to bright (the oldest).

    Args:
        ages: Updates of each entry since its moments were last empty, in the weight's shape.
        mask: True = active; what is frozen is grey. None colours every entry. A pixel that stands for many
            entries has the colour of the mean over the active ones.
        oldest: The age that is brightest; None: the oldest in `ages`.

    Returns:
        An image with a palette, as that of :func:`mask_image`.
    """
    largest = max(int(ages.max()) if oldest is None else oldest, 1)
    active = torch.ones_like(ages, dtype=torch.bool) if mask is None else mask
    shares = _shrunk(as_matrix(active))
    sums = _shrunk(as_matrix(ages * active))
    means = np.divide(sums, shares * largest, out=np.zeros_like(sums), where=shares > 0)
    numbers = np.where(shares > 0, _on_scale(means), _FROZEN)
    return _coloured(numbers, np.isnan(shares), _VIRIDIS)


def film_strip(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int = 6) -> Image.Image:
    """Pictures side by side, each with its caption below, in rows of at most `columns`.

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
        strip.paste(picture.convert("RGB"), (left, top))
        draw.text((left, top + picture.height), caption, fill="#24292f")
    return strip


def _shrunk(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means over blocks, where a matrix is larger than a picture."""
    height, width = matrix.shape
    if max(height, width) <= LARGEST:
        return matrix
    size = (min(width, LARGEST), min(height, LARGEST))
    return np.asarray(Image.fromarray(matrix).resize(size, Image.Resampling.BOX))


def _on_scale(shares: NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers of colours for values from 0 to 1."""
    return _FIRST + np.clip(np.nan_to_num(shares), 0, 1) * (_LAST - _FIRST)


def _coloured(numbers: NDArray[Any], gaps: NDArray[np.bool_], scale: NDArray[np.float64]) -> Image.Image:
    image = Image.fromarray(np.where(gaps, _GAP, numbers.round()).astype(np.uint8))
    image.putpalette(np.vstack([GAP, FROZEN, scale]).round().astype(np.uint8).tobytes())
    times = max(1, min(12, LARGEST // 2 // max(image.size)))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


# ---- during a run


class MaskPictures(Callback):
    """Draws the masks of a few weights and the ages of their entries, every so many changes.

    For each weight a folder gets ``mask_<step>.png`` and ``age_<step>.png``, and at the end of training
    ``history_mask.png`` and ``history_age.png``: the film strips. Loggers that take images get each of
    them as ``masks/<weight>/…``. When a weight has `frames` pictures, every second one is removed and half as
    many are drawn from then on: a long run has no more of them than a short one.

    The first rank draws. Weights that are sharded have no pictures, nor have those that only ever train or
    freeze as a whole: the record says all that there is to see.

    Args:
        every: Changes of a weight's mask from one picture to the next.
        params: Which weights: globs on parameter names among those of the freeze policies.
        count: How many weights at most; those with two dimensions and more come first.
        frames: How many pictures of a weight are kept at most.
        directory: Where the PNGs go; ``masks`` in the trainer's root directory unless given.

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
        # The parameters that may be drawn, by name.
        self._candidates: dict[str, Tensor] = {}
        # By weight: the parameter, the mask last seen, the changes so far, changes from picture to picture.
        self._weights: dict[str, Tensor] = {}
        self._seen: dict[str, Any] = {}
        self._changes: dict[str, int] = {}
        # Checksums of the masks that were in force at a checkpoint: a resumed run begins with them.
        self._restored: dict[str, int] = {}
        self._intervals: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the weights to choose from; a resumed run removes pictures of steps that it takes again."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        found = [each for each in callbacks if isinstance(each, GradientPolicies) and each.freezer]
        self._candidates, self._weights, self._seen = {}, {}, {}
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
        self._weights = {name: matched[name] for name in ordered if name in self._restored}
        for name in self._candidates:
            for path in _frames(self._folder / name):
                if _step_of(path) > trainer.global_step:
                    path.unlink()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Draws what has changed often enough."""
        freezer = self._policies.freezer if self._policies is not None else None
        if freezer is None:
            return
        for name, parameter in self._candidates.items():
            if len(self._weights) == self.count:
                break
            if name not in self._weights and not isinstance(freezer.mask_of(name), bool):
                self._weights[name] = parameter
        for name, parameter in self._weights.items():
            mask = freezer.mask_of(name)
            # A new mask is a new object; one that says the same as before is not set.
            if mask is self._seen.get(name):
                continue
            is_first, self._seen[name] = name not in self._seen, mask
            if is_first and self._restored.get(name) == _checksum(mask, parameter):
                continue
            changes = self._changes.get(name, 0)
            self._changes[name] = changes + 1
            if changes % self._intervals.setdefault(name, self.every) == 0:
                self._draw(trainer, name, parameter)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the film strips."""
        for name in self._weights:
            for kind in (MASK, AGE):
                paths = _frames(self._folder / name, kind)
                if paths:
                    captions = [f"step {_step_of(path):,}" for path in paths]
                    strip = film_strip([Image.open(path) for path in paths], captions)
                    self._keep(trainer, strip, self._folder / name / f"{HISTORY}_{kind}.png", kind=HISTORY)

    def state_dict(self) -> dict[str, Any]:
        """How often masks have changed, how often they are drawn, and which are in force."""
        masks = {name: _checksum(self._seen[name], self._weights[name]) for name in self._seen}
        return {"changes": self._changes, "intervals": self._intervals, "masks": masks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self._changes = dict(state_dict["changes"])
        self._intervals = dict(state_dict["intervals"])
        self._restored = dict(state_dict["masks"])

    def _draw(self, trainer: Trainer, name: str, parameter: Tensor) -> None:
        optimizer = next(
            each
            for each in trainer.optimizers
            if isinstance(each, MaskedOptimizer)
            and any(own is parameter for group in each.param_groups for own in group["params"])
        )
        mask = optimizer.get_mask(parameter).expand(parameter.shape)
        ages = optimizer.age(parameter).expand(parameter.shape)
        for kind, picture in ((MASK, mask_image(mask)), (AGE, age_image(ages, mask))):
            path = self._folder / name / f"{kind}_{trainer.global_step:09d}.png"
            self._keep(trainer, picture, path, kind=kind)
            paths = _frames(self._folder / name, kind)
            if len(paths) > self.frames:
                for path in paths[1::2]:
                    path.unlink()
                self._intervals[name] *= 2 if kind == AGE else 1

    def _keep(self, trainer: Trainer, picture: Image.Image, path: Path, *, kind: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Little is gained by compressing more, and it takes twice as long.
        picture.save(path, compress_level=1)
        label = path.stem if kind == HISTORY else kind
        for logger in trainer.loggers:
            log_image(
                logger,
                f"masks/{path.parent.name}/{label}",
                path,
                trainer.global_step,
                f"masks/{path.parent.name}",
            )


def _checksum(mask: Mask, parameter: Tensor) -> int:
    """A number that tells masks of a parameter apart."""
    flags = as_tensor(mask, parameter.shape).expand(parameter.shape)
    return zlib.crc32(flags.cpu().numpy().tobytes())


def _step_of(path: Path) -> int:
    """The step in the name of a picture, after which it was drawn."""
    return int(path.stem.rpartition("_")[2])


def _frames(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{kind}_[0-9]*.png"))
