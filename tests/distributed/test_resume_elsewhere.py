"""A checkpoint loads under every strategy, and none runs what is in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from process_pool import ProcessPool, refusal
from runs import check_equal, fit

from tests.hostile import MakesFolder

SINGLE = "one process"
KINDS, FROZEN_STATES = ("rows", "entries", "layers"), ("keep", "zero", "drop")
PAIRS = [
    ("fsdp2", SINGLE),
    (SINGLE, "fsdp2"),
    ("fsdp2", "fsdp2"),
    ("fsdp2", "ddp"),
    ("ddp", "fsdp2"),
    (SINGLE, "ddp"),
    ("ddp", SINGLE),
]
# Each pair with each kind of masks and each frozen_state, but not with each of both.
CASES = [
    *((first, second, "entries", "zero") for first, second in PAIRS[:2]),
    *(
        pytest.param(*pair, kind, FROZEN_STATES[(row + column) % 3], marks=pytest.mark.slow)
        for row, pair in enumerate(PAIRS)
        for column, kind in enumerate(KINDS)
    ),
]


def half(strategy: str, kind: str, frozen_state: str, path: str) -> None:
    fit(strategy, kind, frozen_state, settings={"max_epochs": 1}, save_to=path)


def rest(strategy: str, kind: str, frozen_state: str, path: str) -> dict[str, Any]:
    return fit(strategy, kind, frozen_state, resume_from=path)


@pytest.mark.supports("resume elsewhere", loop="lightning", processes="{second}", names={SINGLE: "one"})
@pytest.mark.parametrize(("first", "second", "kind", "frozen_state"), CASES)
def test_a_run_goes_on_under_another_strategy(
    pair: ProcessPool, tmp_path: Path, first: str, second: str, kind: str, frozen_state: str
) -> None:
    path, undisturbed = str(tmp_path / "a.ckpt"), fit(SINGLE, kind, frozen_state)
    if first == SINGLE:
        half(first, kind, frozen_state, path)
    else:
        pair(half, first, kind, frozen_state, path)
    arguments = (second, kind, frozen_state, path)
    ended = [rest(*arguments)] if second == SINGLE else pair(rest, *arguments)
    check_equal(ended, undisturbed)


class SaveInTheFirstWindow(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0:
            trainer.save_checkpoint(self.path)


def resumed_before_the_first_update(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    windows = {"accumulate_grad_batches": 2}
    whole = fit("fsdp2", "rows", settings={**windows, "callbacks": [SaveInTheFirstWindow(path)]})
    return whole, fit("fsdp2", "rows", resume_from=path, settings=windows)


def test_a_checkpoint_of_before_the_first_update_loads(pair: ProcessPool, tmp_path: Path) -> None:
    """Gradients wait then, so torch leaves the optimizer's state out."""
    for whole, resumed in pair(resumed_before_the_first_update, str(tmp_path / "a.ckpt")):
        for what in ("masks", "ages"):
            assert all(torch.equal(resumed[what][name], value) for name, value in whole[what].items())


def refusals(path: str) -> list[str]:
    """What each strategy says of a file in which there is code."""
    messages = []
    for strategy in ("fsdp2", "ddp"):
        dist.barrier()
        messages.append(refusal(fit, strategy, "none", resume_from=path))
    return messages


def test_no_strategy_runs_what_is_in_a_strangers_checkpoint(pair: ProcessPool, tmp_path: Path) -> None:
    path, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    torch.save({"state_dict": {}, "evil": MakesFolder(ran)}, path)
    for messages in pair(refusals, str(path)):
        assert all("is not read: only tensors and plain values are" in message for message in messages)
    assert not ran.exists()
