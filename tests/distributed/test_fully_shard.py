"""FSDP2: masks lie as their parameters do, and a run on two ranks equals one on one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from combinations import combinations
from loops import load, on_ranks, save, take_up, whole
from networks import perceptron
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import distribute_tensor

from gradpolicy import MaskedOptimizer
from gradpolicy.tensors.seeded import RandomMask

STEPS, SAVED_AT = 10, 5
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # Its step count and its product of momenta are the full tensor's.
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.05),
}
LEVELS, FROZEN_STATES = ("tensor", "row", "entry", "seeded"), ("keep", "zero", "drop")
FAST_RUNS = [
    ("tensor", "keep", "adamw"),
    ("row", "zero", "adamw"),
    *(("entry", frozen_state, "adamw") for frozen_state in FROZEN_STATES),
    ("seeded", "drop", "adamw"),
    ("row", "drop", "fused"),
    ("entry", "keep", "fused"),
    ("tensor", "drop", "sgd"),
    ("entry", "zero", "sgd"),
    ("row", "keep", "nadam"),
    ("row", "zero", "nadam"),
]
CHECKPOINTS = [
    ("tensor", "zero"),
    ("row", "drop"),
    *(("entry", frozen_state) for frozen_state in FROZEN_STATES),
    ("seeded", "keep"),
]
Facts = dict[str, list[Tensor]]

IN_THE_TABLE = {"tensor": "tensors", "row": "rows", "entry": "entries", "seeded": "entries"}


def network() -> nn.Sequential:
    # Five rows on two or four ranks do not divide evenly.
    return perceptron(6, 5, 8, 1)


def shard(model: nn.Sequential) -> nn.Sequential:
    return on_ranks(model, "fsdp2", layers=True)


def mask_at(level: str, name: str, shape: torch.Size, step: int) -> Any:
    """A mask for a parameter: new ones every third step."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + step // 3)
    if level == "seeded":
        return RandomMask(seed=0, step=step // 3, name=name, density=0.5)
    coarse = {"tensor": (), "row": (shape[0], *(1,) * (len(shape) - 1)), "entry": tuple(shape)}[level]
    return (torch.rand(coarse, generator=generator) < 0.6).to(here())


def train(model: nn.Module, optimizer: MaskedOptimizer, level: str, steps: range) -> None:
    for step in steps:
        for name, parameter in model.named_parameters():
            if step % 3 == 0:
                optimizer.set_mask(parameter, mask_at(level, name, parameter.shape, step))
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step))
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        optimizer.zero_grad()
        model(inputs[rank::ranks].to(here())).square().mean().backward()
        optimizer.mask_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def facts(model: nn.Module, optimizer: MaskedOptimizer) -> Facts:
    parameters = list(model.parameters())
    return {
        "weights": [whole(parameter) for parameter in parameters],
        "ages": [whole(optimizer.age(p)).broadcast_to(p.shape) for p in parameters],
        "masks": [whole(optimizer.get_mask(p)).broadcast_to(p.shape) for p in parameters],
    }


def same(first: Facts, second: Facts) -> bool:
    for kind in ("ages", "masks"):
        assert all(torch.equal(*both) for both in zip(first[kind], second[kind], strict=True)), kind
    torch.testing.assert_close(first["weights"], second["weights"])
    return True


def made(frozen_state: str, optimizer: str, sharded: bool) -> tuple[nn.Sequential, MaskedOptimizer]:
    model = shard(network()) if sharded else network()
    return model, MaskedOptimizer(OPTIMIZERS[optimizer](model.parameters()), frozen_state=frozen_state)


def trained(level: str, frozen_state: str, optimizer: str, sharded: bool = True) -> Facts:
    model, wrapped = made(frozen_state, optimizer, sharded)
    train(model, wrapped, level, range(STEPS))
    return facts(model, wrapped)


@pytest.mark.supports("{level}", "frozen_state", loop="plain", processes="fsdp2", names=IN_THE_TABLE)
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("level", "frozen_state", "optimizer"), combinations(FAST_RUNS, LEVELS, FROZEN_STATES, tuple(OPTIMIZERS))
)
def test_two_ranks_equal_one_process(
    pair: ProcessPool, level: str, frozen_state: str, optimizer: str
) -> None:
    alone = trained(level, frozen_state, optimizer, sharded=False)
    first, second = pair(trained, level, frozen_state, optimizer)
    assert same(first, alone)
    assert all(torch.equal(*both) for both in zip(first["weights"], second["weights"], strict=True))


def kept_in_bfloat16(sharded: bool = True) -> list[torch.Tensor]:
    """Weights of 16 bits after updates at a small rate, on each rank with the same gradients."""
    model = network().bfloat16()
    model = shard(model) if sharded else model
    optimizer = MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), "drop", master_weights=True)
    for step in range(30):
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if step == 0:
                optimizer.set_mask(parameter, mask_at("entry", name, parameter.shape, 0))
            generator = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16().to(here())
            parameter.grad = distribute_tensor(gradient, *spec(parameter)) if sharded else gradient
        optimizer.step()
        if step == 15:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [whole(parameter) for parameter in model.parameters()]


def spec(parameter: Any) -> tuple[Any, Any]:
    return parameter.device_mesh, parameter.placements


@pytest.mark.supports("master weights", loop="plain", processes="fsdp2")
def test_master_weights_are_those_of_one_process(pair: ProcessPool) -> None:
    alone = kept_in_bfloat16(sharded=False)
    assert not torch.equal(alone[0], whole(network().bfloat16()[0].weight))
    for found in pair(kept_in_bfloat16):
        assert all(torch.equal(*both) for both in zip(found, alone, strict=True))


def shards_of_masks() -> list[tuple[int, int]]:
    """How many entries of each parameter, and flags of its mask, lie on this rank."""
    model, optimizer = made("keep", "adamw", sharded=True)
    sizes = []
    for name, parameter in model.named_parameters():
        optimizer.set_mask(parameter, mask_at("entry", name, parameter.shape, 0))
        local_mask = optimizer.get_mask(parameter).to_local()
        sizes.append((parameter.to_local().numel(), local_mask.numel()))
    return sizes


def test_a_rank_holds_the_masks_of_its_own_shards_only(pair: ProcessPool) -> None:
    for sizes in pair(shards_of_masks):
        assert all(entries == flags for entries, flags in sizes)


# ---- checkpoints


def save_after_half(level: str, frozen_state: str, folder: str) -> None:
    model, optimizer = made(frozen_state, "adamw", sharded=True)
    train(model, optimizer, level, range(SAVED_AT))
    save(folder, model, optimizer)


def load_and_finish(level: str, frozen_state: str, folder: str) -> tuple[Facts, Facts]:
    model, optimizer = made(frozen_state, "adamw", sharded=True)
    load(folder, model, optimizer)
    return finish(level, model, optimizer)


def finish_on_one(level: str, frozen_state: str, folder: str) -> tuple[Facts, Facts]:
    """Goes on without any sharding: the whole checkpoint becomes a file of torch.save first."""
    model, optimizer = made(frozen_state, "adamw", sharded=False)
    dcp_to_torch_save(folder, f"{folder}.pt")
    take_up(torch.load(f"{folder}.pt", weights_only=True), model, optimizer)
    return finish(level, model, optimizer)


def finish(level: str, model: nn.Module, optimizer: MaskedOptimizer) -> tuple[Facts, Facts]:
    at_once = facts(model, optimizer)
    train(model, optimizer, level, range(SAVED_AT, STEPS))
    return at_once, facts(model, optimizer)


def expected(level: str, frozen_state: str) -> tuple[Facts, Facts]:
    model, optimizer = made(frozen_state, "adamw", sharded=False)
    train(model, optimizer, level, range(SAVED_AT))
    return finish(level, model, optimizer)


def agree(found: tuple[Facts, Facts], wanted: tuple[Facts, Facts]) -> bool:
    return all(same(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("level", "frozen_state"), CHECKPOINTS)
def test_a_checkpoint_of_two_ranks_goes_on_on_two_and_on_one(
    pair: ProcessPool, tmp_path: Path, level: str, frozen_state: str
) -> None:
    folder, wanted = str(tmp_path / "saved"), expected(level, frozen_state)
    pair(save_after_half, level, frozen_state, folder)
    assert agree(finish_on_one(level, frozen_state, folder), wanted)
    for found in pair(load_and_finish, level, frozen_state, folder):
        assert agree(found, wanted)


@pytest.mark.supports("resume elsewhere", loop="plain", processes="fsdp2")
@pytest.mark.parametrize(
    ("level", "frozen_state", "ranks"), combinations((), LEVELS, FROZEN_STATES, ("1", "4"))
)
def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_four_and_the_reverse(
    pools: dict[int, ProcessPool], tmp_path: Path, level: str, frozen_state: str, ranks: str
) -> None:
    wanted, other = expected(level, frozen_state), pools[int(ranks)]
    for saving, loading in ((pools[2], other), (other, pools[2])):
        folder = str(tmp_path / f"of_{saving.size}")
        saving(save_after_half, level, frozen_state, folder)
        for found in loading(load_and_finish, level, frozen_state, folder):
            assert agree(found, wanted)


# ---- from any step, where ranks hold few entries or none


def train_few_entries(model: nn.Module, optimizer: MaskedOptimizer, steps: range) -> None:
    """New masks each step: whole ranks rest while others train, and begin to train later than these."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            mask = torch.rand(parameter.shape, generator=generator).to(here()) < 0.4
            optimizer.set_mask(parameter, mask)
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(here())
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def resumed_at_each_step(kind: str, frozen_state: str, bias_correction: str, full: bool) -> list[int]:
    """The steps after which a run that goes on from what was saved departs from the run left alone."""
    options = StateDictOptions(full_state_dict=full)

    def begun() -> tuple[nn.Module, MaskedOptimizer]:
        model = on_ranks(perceptron(4, 3, 1), "fsdp2")
        inner = OPTIMIZERS[kind](model.parameters())
        return model, MaskedOptimizer(inner, frozen_state=frozen_state, bias_correction=bias_correction)

    departed = []
    for saved_at in (1, 2, 3, 5, 8):
        model, optimizer = begun()
        train_few_entries(model, optimizer, range(saved_at))
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        train_few_entries(model, optimizer, range(saved_at, STEPS))
        resumed, other = begun()
        get_state_dict(resumed, other)
        take_up({"model": weights, "optimizer": state}, resumed, other, options=options)
        train_few_entries(resumed, other, range(saved_at, STEPS))
        alone, after = facts(model, optimizer), facts(resumed, other)
        if not all(
            torch.equal(*both) for kind in alone for both in zip(alone[kind], after[kind], strict=True)
        ):
            departed.append(saved_at)
    return departed


FAST_STEPS = (("adamw", "keep", "entry", "whole"), ("sgd", "zero", "tensor", "shards"))


@pytest.mark.supports("resume", loop="plain", processes="fsdp2")
@pytest.mark.parametrize(
    ("kind", "frozen_state", "bias_correction", "form"),
    combinations(
        FAST_STEPS, ("adamw", "sgd", "nadam"), FROZEN_STATES, ("tensor", "entry"), ("whole", "shards")
    ),
)
def test_it_goes_on_from_any_step_where_ranks_hold_few_entries(
    pair: ProcessPool, kind: str, frozen_state: str, bias_correction: str, form: str
) -> None:
    assert pair(resumed_at_each_step, kind, frozen_state, bias_correction, form == "whole") == [[], []]
