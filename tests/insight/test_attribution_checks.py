"""Whether an attribution points at what matters."""

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.insight.attribution import gradient
from gradpolicy.insight.attribution_checks import (
    blur,
    insertion_deletion,
    random_order,
    randomisation_check,
)


class OnePixel(nn.Module):
    """The log-odds of class 1 are ten times the pixel at (1, 2)."""

    def forward(self, images):
        score = 10 * images[:, 0, 1, 2]
        return torch.stack([torch.zeros_like(score), score], dim=1)


@pytest.fixture
def images():
    images = torch.zeros(2, 1, 8, 8)
    images[:, 0, 1, 2] = 1
    return images


def test_an_attribution_of_the_pixel_that_matters_has_the_best_curves(images):
    model = OnePixel()
    right = gradient(model, images, 1)
    curves = insertion_deletion(model, images, right, 1, steps=64)
    whole, gone = (torch.sigmoid(10 * each[0, 0, 1, 2]) for each in (images, blur(images)))
    assert torch.allclose(curves.insertion[:, 0], gone)
    assert torch.allclose(curves.insertion[:, 1:], whole)
    assert torch.allclose(curves.deletion[:, 0], whole)
    assert torch.allclose(curves.deletion[:, 1:], gone)
    wrong = insertion_deletion(model, images, 10 - right, 1, steps=64)
    assert (wrong.insertion_area < curves.insertion_area).all()
    assert (wrong.deletion_area > curves.deletion_area).all()
    assert torch.allclose(curves.deletion_area, gone + (whole - gone) / 128)


def test_curves_begin_and_end_with_the_image_and_its_blurred_copy():
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(2 * 5 * 6, 3)).eval(), torch.rand(4, 2, 5, 6)
    curves = insertion_deletion(model, images, random_order(images))
    classes = model(images).argmax(1)
    for pictures, ends in (
        (images, (curves.insertion[:, -1], curves.deletion[:, 0])),
        (blur(images), (curves.insertion[:, 0], curves.deletion[:, -1])),
    ):
        expected = model(pictures).softmax(1).gather(1, classes[:, None])[:, 0]
        for end in ends:
            torch.testing.assert_close(end, expected)


def test_a_blurred_picture_of_one_colour_stays_as_it_is():
    plain = torch.full((1, 3, 9, 12), 0.4)
    torch.testing.assert_close(blur(plain), plain)
    spot = torch.zeros(1, 1, 17, 17)
    spot[0, 0, 8, 8] = 1
    assert blur(spot).sum() == pytest.approx(1)
    assert blur(spot).max() < 0.1


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def test_layers_are_drawn_anew_from_the_last_to_the_first():
    model, images = network(), torch.rand(2, 1, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = randomisation_check(gradient, model, images, torch.tensor([0, 1]))
    assert [each.layer for each in found] == ["5", "3", "0"]
    assert all(each.similarity.shape == (2,) for each in found)
    assert found[-1].similarity.abs().max() < 0.6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: insertion_deletion(OnePixel(), x, x[:, :, 1:]), "shape"),
        (lambda x: insertion_deletion(OnePixel(), x, x, steps=0), "steps"),
        (lambda x: randomisation_check(gradient, OnePixel(), x, torch.tensor([1, 1])), "no layer"),
    ],
)
def test_wrong_input_is_named(call, words, images):
    with pytest.raises(gp.PolicyError, match=words):
        call(images)
