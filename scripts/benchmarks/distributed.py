"""Many processes on one machine: what agreement costs, what active entries save, how a checkpoint fares."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Row, paired_ratio
from gradpolicy.distributed.agreement import check_agreement
from gradpolicy.distributed.compression import ActiveEntries
from gradpolicy.distributed.reducer import ReducerKeeper
from gradpolicy.faults.checkpoints import write_whole
from gradpolicy.freeze.recipe import RandomMask

SHARES = (1.0, 0.5, 0.1, 0.01)
# Bytes a second of the link that is simulated by waiting for each all-reduce: 1 Gbit/s.
LINK = 125e6
AGREEMENT_EVERY = 100


def agreement() -> list[Row]:
    """Steps with a check of masks and weights every 100th, against steps without."""
    return _on_two_ranks(_agreement)


def traffic() -> list[Row]:
    """Bytes and time of a step over a link of 1 Gbit/s, by the share of entries that train."""
    return _on_two_ranks(_traffic)


def frozen_backward() -> list[Row]:
    """A step with most layers frozen against a step with all of them, on two ranks and on one."""
    return _on_two_ranks(_frozen_backward)


def checkpoints() -> list[Row]:
    """Writing a checkpoint whole, with fsync, against ``torch.save``."""
    content = {"weights": torch.randn(10_000_000)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ckpt"
        row = paired_ratio(
            "checkpoint of 40 MB: whole or not at all / torch.save",
            lambda: write_whole(content, path),
            lambda: torch.save(content, path),
            rounds=7,
            megabytes=path.stat().st_size / 1e6 if path.exists() else 40.0,
        )
    return [row]


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
    step = _stepper(model, torch.optim.AdamW(plain.parameters(), fused=True), torch.randn(64, 512))
    held: dict[str, Any] = dict(plain.named_parameters())
    check = paired_ratio("a check / a step", lambda: check_agreement(held), step, rounds=15)
    share = {key: check[key] / AGREEMENT_EVERY for key in ("ratio", "low", "high")}
    amortized = {"what": f"checks every {AGREEMENT_EVERY} steps, share of a step", "target": 0.005}
    return [check, {**amortized, **share, "unit": "time"}]


class _SlowLink:
    """Makes each all-reduce take as long as its bytes would on a slow link."""

    def __enter__(self) -> None:
        self.original = dist.all_reduce

        def slowed(tensor: Tensor, *positional: Any, **named: Any) -> Any:
            time.sleep(tensor.numel() * tensor.element_size() / LINK)
            return self.original(tensor, *positional, **named)

        dist.all_reduce = slowed

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self.original


def _traffic() -> list[Row]:
    rows = []
    for dtype in (None, "bfloat16"):
        baseline = _hooked(1.0, None)[0]
        for share in SHARES:
            candidate, communication = _hooked(share, dtype)
            with _SlowLink():
                row = paired_ratio(
                    f"{share:.0%} active{', bf16' if dtype else ''}: step / all entries in fp32",
                    candidate,
                    baseline,
                    rounds=5,
                    warmup=1,
                )
            rows.append({**row, "bytes_share": communication.traffic.share})
            wire = {
                "what": f"{share:.0%} active{', bf16' if dtype else ''}: bytes / all bytes",
                "unit": "bytes",
            }
            limit = (share + 0.05) / (2 if dtype else 1)
            rows.append({**wire, "ratio": communication.traffic.share, "target": limit})
    return rows


def _hooked(share: float, dtype: str | None) -> tuple[Callable[[], None], ActiveEntries]:
    plain = _network(depth=4)
    model = DistributedDataParallel(plain)
    communication = ActiveEntries(dtype)
    communication.register(model)
    if share < 1:
        communication.set_masks({p: RandomMask(0, 0, name, share) for name, p in plain.named_parameters()})
    return _stepper(model, torch.optim.SGD(plain.parameters(), lr=0.0), torch.randn(64, 512)), communication


def _frozen_backward() -> list[Row]:
    rows = []
    for wrap in (False, True):
        steps = []
        for frozen in (6, 0):
            plain = _network()
            model: nn.Module = DistributedDataParallel(plain) if wrap else plain
            keeper = ReducerKeeper(model) if isinstance(model, DistributedDataParallel) else None
            plain[:frozen].requires_grad_(False)
            if keeper is not None:
                keeper.refresh()
            trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
            steps.append(_stepper(model, torch.optim.SGD(trained, lr=0.0), torch.randn(256, 512)))
        what = f"6 of 8 layers frozen / none, {'DDP on two ranks' if wrap else 'one process'}"
        rows.append(paired_ratio(what, *steps, rounds=15))
    return rows


def _on_two_ranks(work: Callable[[], list[Row]]) -> list[Row]:
    """Runs the work on two CPU processes; the rows of the first."""
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


BENCHMARKS = {
    "agreement": agreement,
    "traffic": traffic,
    "frozen_backward": frozen_backward,
    "checkpoints": checkpoints,
}
