"""The callback on two ranks: agreement, the reducer, traffic."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from process_pool import ProcessPool
from runs import UPDATES, fit

import gradpolicy as gp
from gradpolicy.distributed.compression import ActiveEntries

FAULT_AT, EVERY = 2, 4


class Fault(Callback):
    """Changes something on rank 1 alone, behind everybody's back."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != FAULT_AT or dist.get_rank() != 1:
            return
        weight = pl_module.layers[1][0].weight
        if self.kind == "mask":
            optimizer = trainer.strategy.optimizers[0]
            mask = optimizer.get_mask(weight).clone()
            mask[0, 0] = ~mask[0, 0]
            optimizer.set_mask(weight, mask)
        else:
            weight.data[3, 3] += 1e-6


def with_fault(kind: str, every: int | None) -> str:
    try:
        fit("ddp", "entries", settings={"callbacks": [Fault(kind)]}, callback={"agreement_every": every})
    except gp.PolicyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "named"), [("mask", "the mask of 'layers.1.0.weight'"), ("weight", "the weights 'layers")]
)
def test_a_rank_that_parts_ways_stops_the_run_within_n_updates(
    pair: ProcessPool, kind: str, named: str
) -> None:
    for message in pair(with_fault, kind, EVERY):
        assert f"before update {EVERY + 1}: {named}" in message
        assert "differs on rank 1" in message


def test_without_a_check_nothing_is_compared(pair: ProcessPool) -> None:
    assert pair(with_fault, "weight", None) == ["", ""]


def test_the_reducer_is_rebuilt_only_when_what_trains_changes(pair: ProcessPool) -> None:
    layers, entries = pair(fit, "ddp", "layers")[0], pair(fit, "ddp", "entries")[0]
    assert layers["rebuilds"] == [1, 1, 1, 2, 2, 2, 3, 3], "new layers every third update"
    assert entries["rebuilds"] == [0] * UPDATES, "no tensor is frozen as a whole"


def test_unused_parameters_are_searched_for_while_a_cut_holds_only(pair: ProcessPool) -> None:
    assert pair(fit, "ddp", "cut off")[0]["searched"] == [False] * 2 + [True] * 3 + [False] * 3
    assert not any(pair(fit, "ddp", "layers")[0]["searched"])


def frozen_by_hand(strategy: str) -> dict[str, Any]:
    return fit(strategy, "none", prepare=freeze_first_layer, settings={"callbacks": [Thaw()]})


def freeze_first_layer(module: LightningModule) -> None:
    module.layers[0].requires_grad_(False)


class Thaw(Callback):
    """What a finetuning callback does: lets the frozen layer train from the third update on."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            pl_module.layers[0].requires_grad_(True)


def test_what_was_frozen_before_wrapping_is_reduced_once_it_thaws(pair: ProcessPool) -> None:
    first, second = pair(frozen_by_hand, "ddp")
    alone = frozen_by_hand("one process")
    for name, weight in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], weight, rtol=2e-4, atol=2e-5)


def with_communication(kind: str, dtype: str | None) -> tuple[dict[str, Any], float]:
    communication = ActiveEntries(dtype)
    known = fit("ddp", kind, callback={"communication": communication})
    return known, communication.traffic.share


@pytest.mark.parametrize("kind", ["entries", "rows", "layers"])
def test_sending_active_entries_only_changes_nothing_but_the_bytes(pair: ProcessPool, kind: str) -> None:
    known, share = pair(with_communication, kind, None)[0]
    plain = pair(fit, "ddp", kind)[0]
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(known["weights"][name], weight, rtol=1e-5, atol=1e-6)
    if kind != "layers":
        assert share < 0.75
    assert share <= 1.0


def with_communication_under_fsdp() -> str:
    with pytest.raises(gp.PolicyError) as refused:
        fit("fsdp2", "entries", callback={"communication": ActiveEntries()})
    return str(refused.value)


def test_the_hook_is_refused_where_there_is_no_reducer(pair: ProcessPool) -> None:
    assert all("goes with DistributedDataParallel" in text for text in pair(with_communication_under_fsdp))


def test_one_process_takes_the_same_settings() -> None:
    known = fit("one process", "entries", callback={"communication": ActiveEntries("bfloat16")})
    assert len(known["losses"]) == UPDATES
