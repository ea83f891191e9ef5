"""Several processes on one machine: the cost of agreement checks, traffic of active entries, checkpoints."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradpolicy as gp
from benchmarks.measure import Row, paired_ratio
from gradpolicy.distributed.agreement import check_agreement
from gradpolicy.distributed.compression import ActiveEntries
from gradpolicy.distributed.ranks import Ranks
from gradpolicy.distributed.reducer import ReducerUpdater
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checkpoints import write_checkpoint
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.seeded import RandomMask

SHARES = (1.0, 0.5, 0.1, 0.01)
AGREEMENT_EVERY = 100


def agreement() -> list[Row]:
    """Steps with a check of masks and weights every 100th, against steps without."""
    return _on_two_ranks(_agreement)


def traffic() -> list[Row]:
    """Bytes and time of a step over a link of 1 Gbit/s, by the share of entries that train.

    Both ranks run in a network namespace with a rate limit.

    Raises:
        PolicyError: If this machine does not allow it (it needs Linux with ``unshare``, ``ip`` and ``tc``).
    """
    # The traffic of the loopback device is the sum of both directions.
    limit = "rate 2gbit burst 256kb latency 400ms"
    set_up = f"ip link set lo up && tc qdisc add dev lo root tbf {limit}"
    namespace = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*namespace, set_up], capture_output=True).returncode:
        raise PolicyError("traffic: needs a network namespace with a rate limit (unshare, ip and tc)")
    program = [sys.executable, "-m", "benchmarks.distributed"]
    command = [*namespace, f'{set_up} && GLOO_SOCKET_IFNAME=lo exec "$@"', "sh", *program]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def frozen_backward() -> list[Row]:
    """A step with most layers frozen against a step with all of them, on two ranks and on one."""
    return _on_two_ranks(_frozen_backward)


def engines() -> list[Row]:
    """A step with six of eight layers frozen as wholes against the engine's own step without policies."""
    return _on_two_ranks(_engines)


def checkpoints() -> list[Row]:
    """Size and time of checkpoints against those of plain AdamW by ``torch.save``."""
    plain = _trained(None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ckpt"
        torch.save(plain, path)
        plain_bytes = path.stat().st_size
        time = paired_ratio(
            f"{plain_bytes / 1e6:.0f} MB: whole or not at all / torch.save",
            lambda: write_checkpoint(plain, path),
            lambda: torch.save(plain, path),
            rounds=7,
        )
        rows = [time]
        for name, seeded in {"entry masks": False, "seeded masks": True}.items():
            write_checkpoint(_trained(seeded), path)
            what = f"{name}, 10 % active: bytes / those of plain AdamW"
            rows.append({"what": what, "ratio": path.stat().st_size / plain_bytes, "unit": "bytes"})
    return rows


def _trained(seeded: bool | None) -> dict[str, Any]:
    """The checkpoint after a step; under entry masks drawn here, or seeded; None: without any."""
    model = _network()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = inner if seeded is None else MaskedOptimizer(inner)
    if isinstance(optimizer, MaskedOptimizer):
        for name, parameter in model.named_parameters():
            drawn = RandomMask(0, 0, name, 0.1)
            shape = parameter.shape
            optimizer.set_mask(parameter, drawn if seeded else drawn.materialize(shape, parameter.device))
    _stepper(model, optimizer, torch.randn(64, 512))()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


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
    ranks = Ranks(model, dict(plain.named_parameters()), None, [optimizer])
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


def _traffic() -> list[Row]:
    rows = []
    for dtype in (None, "bfloat16"):
        baseline = _hooked(1.0, None)[0]
        for share in SHARES:
            candidate, communication = _hooked(share, dtype)
            name = f"{share:.0%} active{', bf16' if dtype else ''}"
            step = paired_ratio(
                f"{name}: step over 1 Gbit/s / all entries in fp32", candidate, baseline, rounds=11
            )
            limit = (share + 0.05) / (2 if dtype else 1)
            sent = communication.traffic.share
            counted = {"what": f"{name}: bytes / all bytes", "unit": "bytes", "ratio": sent, "target": limit}
            rows += [{**step, "bytes_share": sent}, counted]
    return rows


def _hooked(share: float, dtype: str | None) -> tuple[Callable[[], None], ActiveEntries]:
    plain = _network(depth=4)
    model = DistributedDataParallel(plain)
    communication = ActiveEntries(dtype)
    communication.register(model)
    if share < 1:
        communication.use_masks({p: RandomMask(0, 0, name, share) for name, p in plain.named_parameters()})
    return _stepper(model, torch.optim.SGD(plain.parameters(), lr=0.0), torch.randn(64, 512)), communication


def _frozen_backward() -> list[Row]:
    rows = []
    for wrap in (False, True):
        steps = []
        for frozen in (6, 0):
            plain = _network()
            model: nn.Module = DistributedDataParallel(plain) if wrap else plain
            updater = ReducerUpdater(model) if isinstance(model, DistributedDataParallel) else None
            plain[:frozen].requires_grad_(False)
            if updater is not None:
                updater.refresh()
            trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
            steps.append(_stepper(model, torch.optim.SGD(trained, lr=0.0), torch.randn(256, 512)))
        what = f"6 of 8 layers frozen / none, {'DDP on two ranks' if wrap else 'one process'}"
        rows.append(paired_ratio(what, *steps, rounds=15))
    alone, together = (row["ratio"] for row in rows)
    saved = {"what": "what DDP needs of a step / what one process needs", "target": 1.1, "unit": "ratio"}
    return [*rows, {**saved, "ratio": together / alone}]


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
    "traffic": traffic,
    "frozen_backward": frozen_backward,
    "checkpoints": checkpoints,
    "engines": engines,
}

if __name__ == "__main__":
    print(json.dumps(_on_two_ranks(_traffic)))
