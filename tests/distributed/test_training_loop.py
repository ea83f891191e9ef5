"""gp.training on two ranks: they agree, and train what one process trains."""

from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import all_ranks, load, on_ranks, save, share, weights_of
from networks import perceptron
from process_pool import ProcessPool, here, refusal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp
from tests.docs.markdown import DOCS, blocks

MASKS: dict[str, Any] = {
    "layers": lambda: gp.masks.Layerwise(active=1, every=2),
    "entries": lambda: gp.masks.Random(0.5, every=2),
    "topk": lambda: gp.masks.TopK(0.5, every=2),
}

IN_THE_TABLE = {
    "layers": "tensors",
    "topk": "gradient sources",
    "ddp before": "ddp",
    "ddp within": "ddp",
}


def train(kind: str, masks: str) -> dict[str, Tensor]:
    """The weights after eight updates; each rank takes its half of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    y = share((x.sum(1) > 0).long(), kind)
    x = share(x, kind)
    within = kind == "ddp within"
    given = model if within else on_ranks(model, kind.removesuffix(" before"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    policies = {"slow": gp.Scale(0.5, modules="2"), "some": gp.Freeze(MASKS[masks](), frozen_state="zero")}
    with gp.training(given, optimizer, policies, seed=1) as optimizer:
        if within:
            given = on_ranks(model, "ddp")
        for _ in range(8):
            cross_entropy(given(x), y).backward()
            if masks != "topk":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            given.zero_grad()
    return weights_of(model)


@pytest.mark.supports("{masks}", "flow", loop="plain", processes="{kind}", names=IN_THE_TABLE)
@pytest.mark.mostly_slow
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", ["ddp before", "ddp within", "fsdp2"])
def test_ranks_train_what_one_process_does(pair: ProcessPool, kind: str, masks: str) -> None:
    first, second = pair(train, kind, masks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, train("one process", masks), rtol=1e-4, atol=1e-5)


def printed(kind: str) -> str:
    """What a rank prints in a loop that is asked for what trains."""
    model = perceptron(4, 8, 2)
    given = on_ranks(model, kind)
    optimizer = torch.optim.AdamW(model.parameters())
    policies = [gp.Train(params="2.*"), gp.Rates({"*": 0.5})]
    with redirect_stdout(StringIO()) as written, gp.training(given, optimizer, policies, layers=True) as own:
        for _ in range(2):
            given(torch.randn(4, 4)).sum().backward()
            own.step()
    return written.getvalue()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_first_rank_alone_says_what_trains(pair: ProcessPool, kind: str) -> None:
    first, second = pair(printed, kind)
    assert first.count("What trains") == 1
    assert "18 of 58 entries (31" in first
    assert not second


# ---- fully_shard by hand: saved and resumed by torch.distributed.checkpoint


def train_sharded(masks: str, full: bool, steps: range, first: str = "", last: str = "") -> dict[str, Tensor]:
    """The weights after some updates, after loading and before saving if a folder is given."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)), mesh=all_ranks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    policies = {"some": gp.Freeze(MASKS[masks](), frozen_state="drop")}
    with gp.training(model, optimizer, policies, seed=1) as optimizer:
        if first:
            load(first, model, optimizer, full_state_dict=full)
        for step in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[dist.get_rank() :: 2]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if last:
            save(last, model, optimizer, full_state_dict=full)
    return weights_of(model)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sharded_loop_resumes_bit_for_bit_with_what_its_sources_have_decided(
    pair: ProcessPool, tmp_path: Path, masks: str, full: bool
) -> None:
    folder = str(tmp_path / "saved")
    whole, _ = pair(train_sharded, masks, full, range(6))
    pair(train_sharded, masks, full, range(3), "", folder)
    for resumed in pair(train_sharded, masks, full, range(3, 6), folder):
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def run_page(program: str) -> dict[str, Tensor]:
    names: dict[str, Any] = {}
    exec(compile(program, "loops.md", "exec"), names)
    return weights_of(names["model"])


def test_the_page_on_fsdp2_runs_and_resumes_as_it_stands(pair: ProcessPool, tmp_path: Path) -> None:
    from tests.docs.test_integrations import by_hand

    program = blocks(DOCS / "integrations" / "loops.md", "python")[-1]
    text = (DOCS / "integrations" / "loops.md").read_text()
    resume = text.partition("```python no-test\n")[2].partition("```")[0]
    loop = "    for step in range(20):"
    program, resume = (
        each.replace('"checkpoint"', repr(str(tmp_path / "saved"))) for each in (program, resume)
    )
    first, second = pair(run_page, program)
    assert all(torch.equal(first[name], second[name]) for name in first)
    halves = [slice(0, None, 2), slice(1, None, 2)]
    torch.testing.assert_close(first, by_hand(20, lambda step: halves, every=5).state_dict())

    pair(run_page, program.replace(loop, loop.replace("20", "7")))
    begin, _, rest = program.partition(loop)
    block = begin[begin.index("with gp.training") :]
    load = resume.partition(block)[2].partition("    ...")[0]
    assert load
    save = "    weights, state = get_state_dict(model, optimizer)\n    dcp.save"
    resumed = begin + load + loop.replace("20", "13") + rest.partition(save)[0]
    for weights in pair(run_page, resumed):
        assert all(torch.equal(weights[name], value) for name, value in first.items())


def refusals() -> list[str]:
    """What is said to sharding within the block, of a part or of all."""
    said = []
    for part in ("0", ""):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with gp.training(model, optimizer, [gp.Freeze(gp.masks.Random(0.5))]) as optimizer:
            fully_shard(model.get_submodule(part), mesh=all_ranks())
            said.append(refusal(update, model, optimizer))
    return said


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_sharding_within_the_block_is_refused(pair: ProcessPool) -> None:
    for said in pair(refusals):
        assert all("0.weight was replaced after the block began" in each for each in said)


def test_version_one_of_fsdp_is_refused() -> None:
    """It needs a device that is no CPU; its class is known by name."""
    model = type("FullyShardedDataParallel", (nn.Sequential,), {})(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    refused = pytest.raises(gp.PolicyError, match="refused under version 1")
    with refused, gp.training(model, optimizer, [gp.Freeze(gp.masks.Random(0.5))]):
        pass


def train_in_turns(turns: list[str | None], rank: int, ranks: int) -> dict[str, Tensor]:
    """Train in blocks with these masks one after the other; None is without a block."""
    plain = perceptron(6, 8, 8, 2)
    model: nn.Module = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    for turn in turns:
        policies = {"part": gp.Freeze(TURNS[turn](), params="0.weight")} if turn else {}
        with gp.training(model, optimizer, policies) if policies else nullcontext(optimizer) as stepping:
            for step in range(3):
                inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(here())
                stepping.zero_grad()
                model(inputs[rank::ranks]).square().mean().backward()
                stepping.step()
    return {name: value.detach().clone() for name, value in plain.state_dict().items()}


TURNS = {
    "tensor": lambda: gp.masks.Fixed(False),
    "rows": lambda: gp.masks.Rows("2:4"),
    "all": lambda: gp.masks.Fixed(True),
}


def train_in_turns_on_this_rank(turns: list[str | None]) -> dict[str, Tensor]:
    return train_in_turns(turns, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("first", ["tensor", "rows"])
@pytest.mark.parametrize("then", [None, "all", "tensor", "rows"])
def test_ranks_go_on_together_after_the_block(pair: ProcessPool, first: str, then: str | None) -> None:
    turns = [first, then, None]
    one, other = pair(train_in_turns_on_this_rank, turns)
    for name, weight in train_in_turns(turns, 0, 1).items():
        assert torch.equal(one[name], other[name]), name
        torch.testing.assert_close(one[name], weight)
