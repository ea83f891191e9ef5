"""A default device that the caller has set changes nothing.

The default device is "meta" here: a tensor created on it by mistake has no values, and mixes with no other.
"""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.masks import SOURCES, MaskSource
from tests.masks.test_every_source import example

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, batch: Tensor = BATCH) -> Tensor:
    return model(batch).square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = {"embed": nn.Linear(8, 8), "activation": nn.ReLU(), "head": nn.Linear(8, 4)}
    return nn.Sequential(OrderedDict(layers))


def trained(source: MaskSource, default: str, folder: Path) -> dict[str, Tensor]:
    """The weights after some updates under a freeze and a flow policy; half of them after a resume."""
    model = network()
    policies = {
        "some": gp.Freeze(source, params="*.weight", frozen_state="drop"),
        "small": gp.Clip(norm=0.5, modules="head"),
    }
    saved = None
    for begin in (0, 3):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        with torch.device(default), gp.training(model, optimizer, copy.deepcopy(policies)) as masked:
            if saved is not None:
                masked.load_state_dict(saved)
            for _ in range(begin, begin + 3):
                masked.zero_grad()
                loss_of(model).backward()
                masked.step()
            saved = copy.deepcopy(masked.state_dict())
            torch.save(masked.state_dict(dense=True), folder / default)
    return model.state_dict()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="AdamW of torch makes its count of steps on the default device"
)
def test_each_source_trains_and_resumes(source: str, tmp_path: Path) -> None:
    def make() -> MaskSource:
        return gp.masks.Fixed(["head.*"]) if source == "Fixed" else example(SOURCES[source])

    expected, found = (trained(make(), default, tmp_path) for default in ("cpu", "meta"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
