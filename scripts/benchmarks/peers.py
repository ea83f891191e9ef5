"""Masked updates beside what else people use for them, each against torch's fused AdamW taken in turn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import device
from benchmarks.device import HERE
from benchmarks.measure import Row, paired_ratio
from benchmarks.optimizers import LARGE, masked, unmasked, weights
from gradpolicy.errors import PolicyError

Step = Callable[[], object]
ROWS, COLUMNS = LARGE[0]


def by_hand() -> Step:
    """What people write: clone, mask the gradient, step, put back, mask the moments."""
    (parameter,), active = weights(), torch.rand(ROWS, COLUMNS, device=HERE) < 0.1
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()

    @torch.no_grad()
    def step() -> None:
        assert parameter.grad is not None
        before = parameter.clone()
        parameter.grad = torch.where(active, parameter.grad, 0.0)
        optimizer.step()
        parameter.copy_(torch.where(active, parameter, before))
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][key]
            moment.copy_(torch.where(active, moment, 0.0))

    return step


def plain() -> Step:
    """AdamW as torch makes it unless told otherwise: on a CPU an operation after the other."""
    return torch.optim.AdamW(weights()).step


def spam() -> Step:
    """SPAM: AdamW that clips spikes and empties its moments now and then; entries are not frozen.

    Raises:
        PolicyError: If pytorch_optimizer is not installed.
    """
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise PolicyError("SPAM needs pytorch_optimizer: pip install 'gradpolicy[test]'") from error
    return pytorch_optimizer.SPAM(weights()).step


def sparse_adam() -> Step:
    """SparseAdam with a tenth of the rows in the gradient, as an embedding's batch names them; no decay."""
    parameter = nn.Parameter(torch.randn(ROWS, COLUMNS, device=HERE))
    chosen = torch.randperm(ROWS, device=HERE)[: ROWS // 10].sort().values
    values = torch.randn(len(chosen), COLUMNS, device=HERE)
    indices = chosen.unsqueeze(0)
    parameter.grad = torch.sparse_coo_tensor(
        indices, values, parameter.shape, check_invariants=True, is_coalesced=True
    )
    return torch.optim.SparseAdam([parameter]).step


def ours(rows: bool = False, **options: Any) -> Callable[[], Step]:
    """A tenth of the entries or rows, after four changes of the masks."""
    return lambda: masked(density=0.1, rows=rows, **options).step


def peers() -> list[Row]:
    """This package beside what else there is, with a tenth of 20 M entries active."""
    baseline = unmasked()
    steps: dict[str, Callable[[], Step]] = {
        "gradpolicy, 10% of entries, keep": ours(),
        "gradpolicy, 10% of entries, zero": ours(frozen_state="zero"),
        "gradpolicy, 10% of entries, drop": ours(frozen_state="drop"),
        "gradpolicy, 10% of entries, zero, correction by tensor": ours(
            frozen_state="zero", bias_correction="tensor"
        ),
        "gradpolicy, 10% of rows, keep": ours(rows=True),
        "gradpolicy, 10% of rows, drop": ours(rows=True, frozen_state="drop"),
        "the hand-written way, 10% of entries": by_hand,
        "plain AdamW, nothing frozen": plain,
        "SPAM of pytorch_optimizer, nothing frozen": spam,
        "torch.optim.SparseAdam, 10% of rows": sparse_adam,
    }
    # Made one after the other: together they would hold gigabytes.
    return [
        paired_ratio(name, make(), baseline, rounds=7, warmup=2, seconds=device.seconds)
        for name, make in steps.items()
    ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"peers": peers}
