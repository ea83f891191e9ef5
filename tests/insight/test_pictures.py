"""The pictures show what was computed, on one scale, with the class named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradpolicy.insight.pictures import (
    RIGHT,
    UNKNOWN,
    WRONG,
    Sample,
    displayable,
    overlay,
    picture_grid,
    relative,
    save_overlay,
)


def sample(**settings: object) -> Sample:
    image = torch.rand(1, 8, 8)
    attribution = torch.randn(1, 8, 8)
    return Sample(
        **{"image": image, "attribution": attribution, "predicted": "3", "probability": 0.9, **settings}
    )


def test_the_strength_is_relative_to_the_image_and_keeps_its_sign() -> None:
    strength = relative(torch.tensor([[[1.0, -2.0]], [[1.0, -2.0]]]), percentile=100)
    assert strength.tolist() == [[0.5, -1.0]]
    assert relative(torch.zeros(1, 2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    single = torch.zeros(1, 40, 40)
    single[0, 3, 4] = 1e-3
    assert relative(single).max() == 1


def test_a_normalised_image_is_brought_into_range_and_one_in_range_is_kept() -> None:
    assert displayable(torch.tensor([[[-1.0, 3.0]]])).tolist() == [[[0.0] * 3, [1.0] * 3]]
    kept = displayable(torch.full((3, 2, 2), 0.25))
    assert kept.shape == (2, 2, 3)
    assert (kept == 0.25).all()
    assert np.isfinite(overlay(torch.full((3, 4, 4), 7.0), torch.zeros(3, 4, 4))).all()


def test_red_speaks_for_a_class_and_blue_against_it() -> None:
    for_it, against_it, neither = overlay(torch.full((1, 1, 3), 0.5), torch.tensor([[[1.0, -1.0, 0.0]]]))[0]
    assert for_it[0] > for_it[2]
    assert against_it[2] > against_it[0]
    assert neither[0] == neither[1] == neither[2]


def test_a_small_overlay_is_enlarged_in_whole_steps(tmp_path: Path) -> None:
    save_overlay(sample(), tmp_path / "new" / "overlay.png", pixels=70)
    written = np.asarray(Image.open(tmp_path / "new" / "overlay.png"))
    assert written.shape == (64, 64, 3)
    assert (written[:8, :8] == written[0, 0]).all()


@pytest.mark.parametrize(
    ("settings", "caption", "colour"),
    [
        ({"title": "one"}, "one: 3  90 %", UNKNOWN),
        ({"truth": "3"}, "3  90 %", RIGHT),
        ({"truth": "5"}, "3  90 %  (is 5)", WRONG),
    ],
)
def test_a_grid_has_two_pictures_a_sample_their_captions_and_one_scale(
    settings: dict[str, str], caption: str, colour: str
) -> None:
    figure = picture_grid([sample(**settings) for _ in range(3)], "guided", columns=2)
    assert [len(axes.images) for axes in figure.axes[:-1]] == [1] * 6 + [0] * 2
    title = figure.axes[0].get_title(loc="left")
    assert (title, sample(**settings).colour) == (caption, colour)
    ticks = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert ticks == ["against the class", "0", "for the class"]
    with pytest.raises(ValueError, match="no samples"):
        picture_grid([], "nothing")
