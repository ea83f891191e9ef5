"""Pictures become tensors of the size asked for, upright and uncropped but for what sticks out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.images import ImageShape, Normalized, find_images, read_image


def test_a_picture_is_scaled_and_its_sides_are_cut_off(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 2:6] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", ImageShape(3, 2, 2))
    assert image.shape == (3, 2, 2)
    assert image.dtype == torch.float32
    assert image.min() > 0.9


def test_colour_becomes_grey_where_the_model_takes_grey(tmp_path: Path) -> None:
    Image.new("RGB", (5, 5), (255, 0, 0)).save(tmp_path / "red.png")
    image = read_image(tmp_path / "red.png", ImageShape(1, 5, 5))
    torch.testing.assert_close(image, torch.full((1, 5, 5), 0.299), atol=3e-3, rtol=0)


def test_pictures_are_found_by_their_endings_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_images(tmp_path)] == ["a.jpg", "b.PNG"]
    assert find_images(tmp_path / "c.txt") == [tmp_path / "c.txt"]


def test_a_model_that_takes_no_picture_is_refused() -> None:
    with pytest.raises(PolicyError, match="the model takes 2 channels"):
        ImageShape(2, 8, 8)


def test_pixels_are_normalised_before_the_network() -> None:
    model = Normalized(nn.Identity(), mean=(0.5, 0.25), deviation=(0.5, 0.125))
    assert model(torch.full((1, 2, 1, 1), 0.5)).flatten().tolist() == [0.0, 2.0]
