from typing import Any

import pytest
import torch
import torch.distributed as dist
from combinations import combinations
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradpolicy import PolicyError
from gradpolicy.distributed.compression import ActiveEntries

LEVELS = {
    "entries": {"0": "entry", "3": "entry", "5": "entry"},
    "rows": {"0": "row", "3": "row"},
    "mixed": {"0": "tensor", "3": "entry", "5": "row"},
    "tensors": {"0": "tensor", "3": "tensor", "5": "tensor"},
    "none": {},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
}
FAST_AVERAGES = [*((levels, "as it is") for levels in LEVELS), ("mixed", "views"), ("mixed", "small buckets")]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.Conv2d(2, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 30), nn.Tanh(), nn.Linear(30, 4)
    )
    return layers.to(here(), memory_format=torch.channels_last)


def masks_of(model: nn.Module, levels: dict[str, str], density: float) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    masks = {}
    for name, parameter in model.named_parameters():
        level = levels.get(name.partition(".")[0], "whole")
        shape = {
            "entry": parameter.shape,
            "row": (len(parameter), *(1,) * (parameter.dim() - 1)),
            "tensor": (1,) * parameter.dim(),
        }.get(level)
        if shape is not None:
            threshold = density if level != "tensor" else 0.0
            masks[parameter] = (torch.rand(shape, generator=generator) < threshold).to(here())
    return masks


def averaged(levels: dict[str, str], density: float, options: dict[str, Any], dtype: str | None) -> dict:
    """Gradients with the hook and without, the traffic and the active share."""
    rank, everything = dist.get_rank(), torch.tensor(True, device=here())
    results: dict[str, Any] = {}
    for hooked in (True, False):
        plain = network()
        model = DistributedDataParallel(plain, **options)
        masks = masks_of(plain, levels, density)
        communication = ActiveEntries(dtype)
        if hooked:
            communication.register(model)
            communication.use_masks(masks)
        for step in range(3):
            inputs = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model.zero_grad()
            model(inputs.to(here())).square().sum().backward()
        active = [masks.get(p, everything).expand_as(p) for p in plain.parameters()]
        gradients = [p.grad.clone() for p in plain.parameters()]
        if hooked:
            results |= {"hooked": gradients, "traffic": communication.traffic}
        else:
            results["masked"] = [torch.where(*both, 0.0) for both in zip(active, gradients, strict=True)]
    share = sum(int(mask.sum()) for mask in active) / sum(mask.numel() for mask in active)
    return {**results, "share": share}


@pytest.mark.parametrize(("levels", "options"), combinations(FAST_AVERAGES, tuple(LEVELS), tuple(OPTIONS)))
def test_active_gradients_are_averaged_and_frozen_ones_are_zero(
    pair: ProcessPool, levels: str, options: str
) -> None:
    first, second = pair(averaged, LEVELS[levels], 0.2, OPTIONS[options], None)
    for hooked, masked, other in zip(first["hooked"], first["masked"], second["hooked"], strict=True):
        torch.testing.assert_close(hooked, masked)
        assert torch.equal(hooked == 0, masked == 0)
        assert torch.equal(hooked, other)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_it_composes_with_half_precision(pair: ProcessPool, dtype: str, tolerance: float) -> None:
    for result in pair(averaged, {"3": "entry"}, 0.2, {}, dtype):
        assert result["traffic"].share <= (result["share"] + 0.05) / 2
        for hooked, masked in zip(result["hooked"], result["masked"], strict=True):
            scale = masked.abs().max().item()
            torch.testing.assert_close(hooked, masked, rtol=0, atol=2 * tolerance * scale)


def accumulated() -> bool:
    """Whether a window of two batches, the first without reduction, gives the gradients of both."""
    rank = dist.get_rank()
    found = []
    for hooked in (True, False):
        plain = network()
        model = DistributedDataParallel(plain)
        masks = masks_of(plain, {"3": "entry"}, 0.5)
        if hooked:
            communication = ActiveEntries()
            communication.register(model)
            communication.use_masks(masks)
        with model.no_sync():
            model(torch.full((1, 2, 6, 6), rank + 1.0, device=here())).sum().backward()
        model(torch.full((1, 2, 6, 6), rank + 3.0, device=here())).sum().backward()
        weight = plain[3].weight
        found.append(torch.where(masks[weight], weight.grad, 0.0))
    return torch.allclose(*found)


def test_it_holds_under_accumulation(pair: ProcessPool) -> None:
    assert pair(accumulated) == [True, True]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PolicyError, match="did you mean 'bfloat16'"):
        ActiveEntries("bfloat")


def test_it_goes_with_a_wrapped_model_only() -> None:
    with pytest.raises(PolicyError, match="needs DistributedDataParallel, got Linear"):
        ActiveEntries().register(nn.Linear(1, 1))
