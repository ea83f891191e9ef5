import copy
import io
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import perceptron
from process_pool import ProcessPool, here, refusal
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradpolicy as gp
from gradpolicy import MaskedOptimizer, PolicyError
from gradpolicy.optim.zero_redundancy import as_masked as masked

STEPS = 9


@pytest.mark.slow
def test_who_does_not_use_it_does_not_load_it():
    """Torch compiles TorchScript for half a second then, and warns of it."""
    program = "import sys, gradpolicy.optim; assert 'torch.distributed.optim' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def network() -> nn.Sequential:
    return perceptron(6, 8, 8, 2)


def set_masks(optimizer: MaskedOptimizer, model: nn.Module, step: int, frozen_state: str) -> None:
    """New masks every third step: a tensor's, rows', entries'."""
    if step % 3:
        return
    generator = torch.Generator().manual_seed(step)
    shapes = [(), (), (8, 1), (), (2, 8), (2,)]
    for parameter, shape in zip(model.parameters(), shapes, strict=True):
        mask = (torch.rand(shape, generator=generator) < 0.5).to(here())
        optimizer.set_mask(parameter, mask, frozen_state=frozen_state)


def train(model: nn.Module, optimizer: MaskedOptimizer, frozen_state: str, steps: range) -> None:
    for step in steps:
        set_masks(optimizer, model, step, frozen_state)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step))
        optimizer.zero_grad()
        model(inputs.to(here())).square().mean().backward()
        optimizer.mask_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def zero(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def facts(model: nn.Module, optimizer: MaskedOptimizer) -> list[Tensor]:
    parameters = list(model.parameters())
    ages = [optimizer.age(parameter).expand(parameter.shape) for parameter in parameters]
    masks = [optimizer.get_mask(parameter).expand(parameter.shape) for parameter in parameters]
    return [tensor.detach().clone() for tensor in (*parameters, *ages, *masks)]


def trained(frozen_state: str, resume_at: int | None) -> tuple[list[Tensor], int, int]:
    """Everything known after training, perhaps saved and loaded in the middle; bytes; copies of state."""
    model = network()
    optimizer = masked(zero(model))
    train(model, optimizer, frozen_state, range(resume_at or STEPS))
    if resume_at is not None:
        optimizer.consolidate_state_dict()
        saved: list[Any] = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        model, optimizer = gone_on(saved[0], model.state_dict(), frozen_state, resume_at)
    return facts(model, optimizer), optimizer.state_bytes(), len(optimizer.inner.state)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def trained_alone(frozen_state: str, saved_at: int = 0) -> dict[str, Any]:
    """What one process knows after training without ZeRO, and its checkpoint on the way."""
    model = network()
    optimizer = masked(adam(model))
    train(model, optimizer, frozen_state, range(saved_at))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, frozen_state, range(saved_at, STEPS))
    known, held = facts(model, optimizer), optimizer.state_bytes()
    return {"facts": known, "bytes": held, "saved": saved, "weights": weights}


@pytest.mark.supports(
    "tensors", "rows", "entries", "frozen_state", "clipping", "resume", loop="plain", processes="zero1"
)
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("resume_at", [None, 4])
def test_it_equals_one_process_bit_for_bit(
    pair: ProcessPool, frozen_state: str, resume_at: int | None
) -> None:
    alone = pair(trained_alone, frozen_state)[0]["facts"]
    for known, _, copies in pair(trained, frozen_state, resume_at):
        assert all(torch.equal(*both) for both in zip(known, alone, strict=True))
        assert copies == 0, "no second copy of the state"


def test_state_is_shared_out(pair: ProcessPool) -> None:
    whole = pair(trained_alone, "keep")[0]["bytes"]
    shares = [used / whole for _, used, _ in pair(trained, "keep", None)]
    assert max(shares) < 0.75


def gone_on(
    state: dict[str, Any], weights: dict[str, Tensor], frozen_state: str, step: int
) -> tuple[nn.Module, MaskedOptimizer]:
    """A new model and optimizer that take up a checkpoint and train to the end."""
    # What comes from the test lies in memory that the processes share.
    state = through_a_file(state)
    model = network()
    model.load_state_dict(weights)
    optimizer = masked(zero(model))
    optimizer.load_state_dict(state)
    assert None not in state["state"].values(), "what is loaded stays as it was"
    train(model, optimizer, frozen_state, range(step, STEPS))
    return model, optimizer


def saved_on_one_loads_on_two(state: dict[str, Any], weights: dict[str, Tensor]) -> list[Tensor]:
    return facts(*gone_on(state, weights, "zero", 4))


@pytest.mark.supports("resume elsewhere", loop="plain", processes="zero1")
def test_a_checkpoint_of_one_process_goes_on_under_zero(pair: ProcessPool) -> None:
    alone = pair(trained_alone, "zero", 4)[0]
    for known in pair(saved_on_one_loads_on_two, alone["saved"], alone["weights"]):
        assert all(torch.equal(*both) for both in zip(known, alone["facts"], strict=True))


def wrapped_kinds() -> list[str]:
    model = network()
    return [type(MaskedOptimizer(made)).__name__ for made in (zero(model), adam(model))]


def test_masked_optimizer_is_of_the_right_kind_by_itself(pair: ProcessPool) -> None:
    assert pair(wrapped_kinds) == [["MaskedZero", "MaskedOptimizer"]] * 2


def said_of_entries(kind: type[torch.optim.Optimizer]) -> tuple[list[str], list[str]]:
    """What masking and planning say of a mask on entries and of a factor on gradients."""
    model, entries = network(), torch.eye(8, 6, dtype=torch.bool)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.05)
    policies = {
        "half": gp.Freeze(gp.masks.Fixed({"0.weight": entries}), params="0.weight"),
        "slow": gp.Scale(0.1, params="2.weight"),
    }
    planned = gp.plan(model, policies, lambda copied: copied(torch.ones(2, 6)).sum(), optimizers=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MaskedOptimizer(optimizer).set_mask(model[0].weight, entries)
    return [str(each.message) for each in caught], list(planned.warnings)


def test_warnings_are_about_the_optimizer_that_updates(pair: ProcessPool) -> None:
    for said, planned in pair(said_of_entries, torch.optim.AdamW):
        assert said == []
        assert len(planned) == 1
        assert planned[0].startswith("slow: AdamW divides the factor")
    by_rank = pair(said_of_entries, torch.optim.Rprop)
    assert sum(len(said) for said, _ in by_rank) == 1, "only the owner of the parameter masks its state"
    for said, planned in by_rank:
        assert all(line.startswith("Rprop steps whole tensors") for line in said)
        assert any(line.startswith("half: Rprop steps whole tensors") for line in planned)


def overlapping() -> str:
    parameters = network().parameters()
    inner = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1, overlap_with_ddp=True)
    return refusal(MaskedOptimizer, inner)


def test_overlap_with_the_backward_pass_is_refused(pair: ProcessPool) -> None:
    assert all("overlap_with_ddp=False" in message for message in pair(overlapping))


def test_deepspeed_is_refused_with_the_reason() -> None:
    class FusedAdam(torch.optim.Adam):
        pass

    FusedAdam.__module__ = "deepspeed.ops.adam.fused_adam"
    with pytest.raises(PolicyError, match=r"refused under DeepSpeed except .*integrations\.deepspeed"):
        masked(FusedAdam(network().parameters()))
