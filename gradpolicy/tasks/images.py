"""Pictures from files, as tensors of a model's input shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from gradpolicy.errors import PolicyError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class ImageShape:
    """The shape of a model's input images.

    Attributes:
        channels: 1 for grey, 3 for colour.
        height: The height in pixels.
        width: The width in pixels.
    """

    channels: int
    height: int
    width: int

    def __post_init__(self) -> None:
        """Check that pictures can be converted to this shape."""
        if self.channels not in MODES:
            raise PolicyError(f"images: the model takes {self.channels} channels; pictures have 1 or 3")


def images_of(batch: Any, owner: str) -> tuple[Tensor, Tensor | None]:
    """Return the images of a batch and, if it has more entries, their classes, which are the second entry.

    Args:
        batch: A batch of a data loader.
        owner: The owner of the batch, for the message.

    Raises:
        PolicyError: If its first entry is not images.
    """
    parts = batch if isinstance(batch, list | tuple) else [batch]
    images = parts[0] if parts else None
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        given = type(images).__name__
        if isinstance(images, Tensor):
            given = (
                f"a tensor of {str(images.dtype).removeprefix('torch.')} with the shape {tuple(images.shape)}"
            )
        raise PolicyError(
            f"{owner} holds no images: a batch must begin with a floating-point tensor of the shape (images, "
            f"channels, height, width); this one begins with {given}"
        )
    classes = parts[1] if len(parts) > 1 else None
    known = isinstance(classes, Tensor) and classes.dim() == 1 and not classes.is_floating_point()
    return images, classes if known else None


def find_images(path: Path) -> list[Path]:
    """Return the pictures in a directory in the order of their names, or a single picture.

    Raises:
        PolicyError: If there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise PolicyError(f"images: {path} does not exist; images=test takes the run's test images")
    found = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
    if not found:
        raise PolicyError(f"images: {path} holds no picture ({', '.join(SUFFIXES)})")
    return found


def read_image(path: Path, shape: ImageShape) -> Tensor:
    """Read a picture, scale it and crop it.

    Returns:
        A float32 tensor in [0, 1], of the given shape.

    Raises:
        PolicyError: If the file is not a picture.
    """
    try:
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture).convert(MODES[shape.channels])
    except (UnidentifiedImageError, OSError) as error:
        raise PolicyError(f"images: {path} cannot be read as a picture: {error}") from error
    fitted = ImageOps.fit(upright, (shape.width, shape.height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(fitted, dtype=np.float32) / 255)
    return pixels.view(shape.height, shape.width, shape.channels).permute(2, 0, 1).contiguous()
