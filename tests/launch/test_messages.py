"""One clear line for what libraries raise for wrong input."""

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gradpolicy.launch.messages import explain


def test_what_hydra_cannot_build_is_told_under_its_key_with_the_cause() -> None:
    node = {"hydra": {"launcher": {"_target_": "fractions.Fraction", "numerator": "x"}}}
    with pytest.raises(InstantiationException) as failed:
        instantiate(node)
    assert explain(failed.value) == "hydra.launcher: ValueError: Invalid literal for Fraction: 'x'"
