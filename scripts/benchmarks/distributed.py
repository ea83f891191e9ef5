"""Two processes on one machine: agreement checks, and steps with frozen layers under each engine."""

import importlib
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp
from benchmarks.measure import Row, paired_ratio
from gradpolicy.freezing import Freezer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.seeded import RandomMask
from gradpolicy.train.agreement import check_agreement
from gradpolicy.train.ranks import Ranks

AGREEMENT_EVERY = 100


def agreement() -> list[Row]:
    """Steps with a check of masks and weights every 100th, against steps without."""
    return _on_two_ranks(_agreement)


def engines() -> list[Row]:
    """A step with six of eight layers frozen as wholes against the engine's own step without policies."""
    return _on_two_ranks(_engines)


def _network(width: int = 512, depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _agreement() -> list[Row]:
    plain = _network()
    model = DistributedDataParallel(plain)
    optimizer = MaskedOptimizer(torch.optim.AdamW(plain.parameters(), fused=True))
    for name, parameter in plain.named_parameters():
        optimizer.set_mask(parameter, RandomMask(0, 0, name, 0.5).materialize(parameter.shape))
    ranks = Ranks(model, dict(plain.named_parameters()), Freezer(plain, [optimizer], {}), [optimizer])
    step = _stepper(model, optimizer, torch.randn(64, 512))
    check = paired_ratio(
        "a check of masks, ages, weights / a step",
        lambda: check_agreement(ranks.replicated()[None]),
        step,
        rounds=15,
    )
    share = {key: check[key] / AGREEMENT_EVERY for key in ("ratio", "low", "high")}
    amortized = {"what": f"checks every {AGREEMENT_EVERY} steps, share of a step", "target": 0.005}
    return [check, {**amortized, **share, "unit": "time"}]


def _engines() -> list[Row]:
    policies = {"layers": gp.Freeze(gp.masks.Fixed([f"{layer}.*" for layer in (6, 7)]), frozen_state="drop")}
    rows = []
    with ExitStack() as blocks:

        def wrapped(shard: Callable[[nn.Module], nn.Module], frozen: bool) -> Callable[[], None]:
            model = shard(_network())
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            if frozen:
                optimizer = blocks.enter_context(gp.training(model, optimizer, policies))
            return _stepper(model, optimizer, torch.randn(256, 512))

        def engine(stage: int, frozen: bool) -> Callable[[], None]:
            model = _deepspeed(stage)
            if frozen:
                integration = importlib.import_module("gradpolicy.integrations.deepspeed")
                blocks.enter_context(integration.training(model, policies))
            batch = torch.randn(256, 512)

            def step() -> None:
                model.backward(model(batch).square().mean())
                model.step()

            return step

        made: dict[str, Callable[[bool], Callable[[], None]]] = {
            "DDP": partial(wrapped, DistributedDataParallel),
            "FSDP2": partial(wrapped, _sharded),
            **{f"DeepSpeed, stage {stage}": partial(engine, stage) for stage in (1, 2, 3)},
        }
        for name, make in made.items():
            steps = make(True), make(False)
            rows.append(paired_ratio(f"{name}: 6 of 8 layers frozen / no policies", *steps, target=1.05))
    return rows


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _deepspeed(stage: int) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    # What it would compile for the CPU takes minutes; gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {"train_micro_batch_size_per_gpu": 256, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _on_two_ranks(work: Callable[[], list[Row]]) -> list[Row]:
    """Run the work on two CPU processes; return the rows of the first."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, f"{folder}/store", work, answers)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        rows: list[Row] = answers.get()
        for process in processes:
            process.join()
    return rows


def _rank(rank: int, store: str, work: Callable[[], list[Row]], answers: Any) -> None:
    torch.set_num_threads(max((os.cpu_count() or 2) // 2, 1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = work()
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "agreement": agreement,
    "engines": engines,
}
