"""Where the class logits are found in what models give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.logits import class_logits
from gradpolicy.tasks import Prediction


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: Prediction(logits=x, probe_logits=x), lambda x: {"logits": x}]
)
def test_logits_are_found_in_what_models_give(wrap: Callable[[Tensor], object]) -> None:
    logits = torch.rand(2, 3)
    assert class_logits(wrap(logits)) is logits


def test_an_output_without_logits_is_refused() -> None:
    with pytest.raises(PolicyError, match="gave str"):
        class_logits("text")
