"""With other optimizers than Adam two ranks train what one process trains."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from lightning.pytorch import LightningModule
from loops import on_ranks, share, weights_of, whole
from process_pool import ProcessPool
from runs import check_equal, fit
from torch import Tensor, nn

import gradpolicy as gp

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Any]] = {
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.02),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.02),
    "schedule-free": lambda weights: schedulefree.AdamWScheduleFree(weights, lr=0.02),
    "lamb": lambda weights: pytorch_optimizer.Lamb(weights, lr=0.02),
}
IN_THE_TABLE = {
    **dict.fromkeys(("muon", "adafactor", "lamb"), "no update rule"),
    "one process": "one",
}
# Optimizers whose state is exact for full tensors alone.
OF_TENSORS = ("lamb",)


def train(kind: str, optimizer: str) -> dict[str, Tensor]:
    """Return how far the weights go in eight updates; each rank takes its half of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    # Muon rounds gradients to bfloat16, which makes much of differences in their last bits.
    dtype = torch.float64 if optimizer == "muon" else torch.float32
    start = copy.deepcopy(model.to(dtype).state_dict())
    inputs = share(torch.randn(8, 256).to(dtype), kind)
    given = on_ranks(model, kind)
    inner = OPTIMIZERS[optimizer](model.parameters())
    source = gp.masks.Random(0.5, level="tensor" if optimizer in OF_TENSORS else "row", every=2)
    policies = {"half": gp.Freeze(source, params="[01].*", frozen_state="zero")}
    with gp.training(given, inner, policies) as wrapped:
        if hasattr(wrapped, "train"):
            wrapped.train()
        for _ in range(8):
            given(inputs).square().mean().backward()
            wrapped.step()
            wrapped.zero_grad()
    return {name: weight - start[name] for name, weight in weights_of(model).items()}


@pytest.mark.supports("{optimizer}", loop="plain", processes="{kind}", names=IN_THE_TABLE)
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*(("ddp", optimizer) for optimizer in OPTIMIZERS), ("fsdp2", "schedule-free")],
)
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, optimizer: str) -> None:
    first, second = pair(train, kind, optimizer)
    for name, moved in train("one process", optimizer).items():
        assert torch.equal(first[name], second[name]), name
        assert (first[name] - moved).norm() < 0.02 * moved.norm(), name
        assert torch.equal(first[name] == 0, moved == 0), name


def masked_shards() -> tuple[list[str], bool]:
    torch.manual_seed(0)
    rows = torch.arange(8).view(8, 1) % 3 == 1
    model = on_ranks(nn.Linear(8, 8, bias=False), "fsdp2")
    optimizer = gp.MaskedOptimizer(torch.optim.Muon(model.parameters()))
    before = whole(model.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.set_mask(model.weight, rows)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    frozen = ~rows.flatten()
    same = torch.equal(whole(model.weight)[frozen], before[frozen])
    return [str(each.message) for each in caught], same


@pytest.mark.slow
@pytest.mark.supports("no update rule", loop="plain", processes="fsdp2")
def test_rows_of_sharded_parameters_are_put_back(pair: ProcessPool) -> None:
    for said, same in pair(masked_shards):
        assert any(line.startswith("Muon steps full tensors") for line in said)
        assert same


def fit_with_several(strategy: str) -> dict[str, Any]:
    def configure(module: LightningModule) -> gp.Optimizers:
        entries: list[dict[str, Any]] = [
            {"params": "layers.*.weight", "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
            {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.01},
        ]
        return gp.Optimizers(module, entries)

    def prepare(module: LightningModule) -> None:
        module.configure_optimizers = lambda: configure(module)  # type: ignore[method-assign]

    return fit(strategy, "entries", "zero", prepare=prepare)


@pytest.mark.supports("several optimizers", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_several_optimizers_train_what_one_process_trains(pair: ProcessPool, strategy: str) -> None:
    check_equal(pair(fit_with_several, strategy), fit_with_several("one process"))
