"""The digits are split by a seed of their own."""

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.tasks import DigitsDataModule


def parts(**settings: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = DigitsDataModule(**settings)
    data.setup()
    return [part.tensors for part in (data.train_set, data.validation_set, data.test_set)]


def test_the_parts_have_the_shares_asked_for_in_every_class() -> None:
    sizes = [len(labels) for _, labels in parts(validation_share=0.1, test_share=0.2)]
    assert sizes == [1257, 180, 360]
    for _, labels in parts():
        assert torch.bincount(labels, minlength=10).float().div(len(labels)).sub(0.1).abs().max() < 0.02


def test_no_image_is_in_two_parts_and_none_is_lost() -> None:
    images = torch.cat([images for images, _ in parts()])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert len(images.unique(dim=0)) == 1797


def test_the_split_follows_the_seed_and_not_the_global_state() -> None:
    first, again, other = parts(seed=1), parts(seed=1), parts(seed=2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][1], other[0][1])


@pytest.mark.parametrize(
    "settings", [{"test_share": 0.0}, {"validation_share": 1.5}, {"validation_share": 0.8}]
)
def test_shares_that_leave_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="_share"):
        DigitsDataModule(**settings)
