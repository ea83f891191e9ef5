"""Pictures become tensors of the size asked for, upright and uncropped but for what sticks out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.images import ImageShape, find_images, images_of, read_image


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


def test_a_batch_is_taken_apart() -> None:
    images = torch.rand(2, 1, 4, 4)
    assert images_of(images, "x") == (images, None)
    assert images_of([images, torch.tensor([3, 1]), "more"], "x")[1].tolist() == [3, 1]
    for masks in (torch.zeros(2, 4, 4, dtype=torch.long), torch.rand(2), None):
        assert images_of((images, masks), "x") == (images, None)


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        ((torch.zeros(8, 64, dtype=torch.long), None), r"a tensor of int64 with the shape \(8, 64\)"),
        ([torch.rand(8, 16)], r"a tensor of float32 with the shape \(8, 16\)"),
        (torch.rand(8, 5, 1, 4, 4), r"a tensor of float32 with the shape \(8, 5, 1, 4, 4\)"),
        (torch.zeros(8, 1, 4, 4, dtype=torch.uint8), "a tensor of uint8"),
        ({"input_ids": torch.zeros(8, 64)}, "dict"),
        ((), "NoneType"),
    ],
)
def test_a_batch_without_images_is_refused(batch: object, given: str) -> None:
    with pytest.raises(PolicyError, match=f"^the data holds no images: .*; this one begins with {given}"):
        images_of(batch, "the data")
