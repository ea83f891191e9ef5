"""The transformer sees the past and not the future."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from gradpolicy.errors import PolicyError
from gradpolicy.tasks import CharacterTransformer


@pytest.fixture
def model() -> CharacterTransformer:
    return CharacterTransformer(vocabulary=11, context=8, width=16, layers=2, heads=2).eval()


def test_a_character_changes_no_prediction_before_it(model: CharacterTransformer) -> None:
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert not difference[:5].any()
    assert difference[5:].all()


def test_it_starts_knowing_nothing(model: CharacterTransformer) -> None:
    tokens = torch.randint(11, (64, 8))
    assert cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item() == pytest.approx(
        math.log(11), abs=0.1
    )


def test_it_continues_a_text(model: CharacterTransformer) -> None:
    start = torch.tensor([[1, 2, 3]])
    longer = model.generate(start, 9, torch.Generator().manual_seed(0))
    assert longer.shape == (1, 12)
    assert torch.equal(longer[:, :3], start)


def test_too_long_a_text_or_heads_that_do_not_divide_are_refused(model: CharacterTransformer) -> None:
    with pytest.raises(ValueError, match="context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(PolicyError, match=r"model\.heads"):
        CharacterTransformer(width=10, heads=3)


def test_its_parameters_lie_in_numbered_layers_between_embedding_and_head(
    model: CharacterTransformer,
) -> None:
    roots = list(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in model.named_parameters()))
    assert roots == [
        "embedding.token",
        "embedding.position",
        "layers.0",
        "layers.1",
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
