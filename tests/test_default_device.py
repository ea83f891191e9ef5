"""A default device that the caller has set changes nothing.

The default device is "meta" here: a tensor created on it by mistake has no values, and mixes with no other.
"""

import copy
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.insight.attribution import smoothgrad
from gradpolicy.insight.attribution_checks import insertion_deletion, random_order
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
    policies = {"some": gp.Freeze(source, frozen_state="drop"), "small": gp.Clip(norm=0.5, modules="head")}
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


SCORED = {
    f"{level}s by {by}": lambda by=by, level=level: gp.masks.TopK(0.3, by=by, level=level)
    for by in ("magnitude", "fisher")
    for level in ("entry", "row")
}
EXAMPLES = {name: partial(example, kind) for name, kind in SOURCES.items()} | SCORED


@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="AdamW of torch makes its count of steps on the default device"
)
def test_each_source_trains_and_resumes(source: str, tmp_path: Path) -> None:
    expected, found = (trained(EXAMPLES[source](), default, tmp_path) for default in ("cpu", "meta"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_changes_are_saved_merged_and_applied(tmp_path: Path) -> None:
    base, model = network(), network()
    with torch.no_grad():
        model.embed.weight[1] += 1.0
        model.head.weight[0, 3] -= 0.5
    with torch.device("meta"):
        for name in ("one", "other"):
            gp.delta.save(tmp_path / name, model, base.state_dict())
        gp.delta.merge([tmp_path / "one", tmp_path / "other"], [0.5, 0.5], tmp_path / "both")
        gp.delta.apply(base, tmp_path / "both")
    assert torch.equal(base.embed.weight, model.embed.weight)
    assert torch.equal(base.head.weight, model.head.weight)


def test_rules_are_checked() -> None:
    inputs = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    expected = gp.gradcheck_rule("gate", torch.relu, inputs)
    with torch.device("meta"):
        assert gp.gradcheck_rule("gate", torch.relu, inputs) == expected


def test_pixels_are_attributed() -> None:
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.rand(2, 1, 4, 4)
    expected = smoothgrad(model, images, samples=2), random_order(images)
    curves = insertion_deletion(model, images, expected[0], steps=4)
    with torch.device("meta"):
        found = smoothgrad(model, images, samples=2), random_order(images)
        assert torch.equal(insertion_deletion(model, images, found[0], steps=4).insertion, curves.insertion)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
