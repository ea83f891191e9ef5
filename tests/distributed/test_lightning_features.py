"""Under each of Lightning's strategies two ranks train as one process, and resume with the same bits."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from loops import weights_of
from process_pool import ProcessPool
from runs import UPDATES, check_equal, fit
from safetensors.torch import load_file, save_file

import gradpolicy as gp
from gradpolicy.freezing.row_gradients import _RowForward
from gradpolicy.insight.audit import Audit

STRATEGIES = ["ddp", "fsdp2"]
KINDS = ["gradient sources", "rates", "phases"]
ACCUMULATION: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3}


@functools.cache
def alone(kind: str, accumulate: bool) -> dict[str, Any]:
    return fit("one process", kind, "zero", settings=ACCUMULATION if accumulate else None)


@pytest.mark.supports("{kind}", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_policies_train_what_one_process_trains(pair: ProcessPool, kind: str, strategy: str) -> None:
    check_equal(pair(fit, strategy, kind, "zero"), alone(kind, accumulate=False))


@pytest.mark.supports("accumulation", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_train_what_one_process_trains(pair: ProcessPool, strategy: str) -> None:
    ranks = pair(fit, strategy, "all kinds", "zero", "32-true", ACCUMULATION)
    check_equal(ranks, alone("all kinds", accumulate=True))


def fit_rows(strategy: str) -> tuple[dict[str, Any], int]:
    """Return what `fit` does, and the forward passes in which a layer computes the gradient of rows alone."""
    found = []

    def prepare(module: LightningModule) -> None:
        layer = module.get_submodule("layers.1.0")
        layer.register_forward_pre_hook(
            lambda layer, _: found.append(isinstance(vars(layer).get("forward"), _RowForward))
        )

    return fit(strategy, "rows", "zero", prepare=prepare), sum(found)


@pytest.mark.supports("row gradients", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_active_rows_train_what_one_process_trains(pair: ProcessPool, strategy: str) -> None:
    expected, _ = fit_rows("one process")
    (first, of_first), (second, of_second) = pair(fit_rows, strategy)
    # FSDP2 computes whole gradients in its first pass.
    assert of_first == of_second >= UPDATES - 1
    check_equal([first, second], expected)


def resumed(strategy: str, kind: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an undisturbed run, and one that was resumed after the first of its two epochs."""
    undisturbed = fit(strategy, kind, "drop")
    fit(strategy, kind, "drop", settings={"max_epochs": 1}, save_to=path)
    return undisturbed, fit(strategy, kind, "drop", resume_from=path)


@pytest.mark.supports("resume", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["all kinds", *KINDS])
def test_a_resumed_run_ends_with_the_same_bits(
    pair: ProcessPool, tmp_path: Path, kind: str, strategy: str
) -> None:
    for undisturbed, again in pair(resumed, strategy, kind, str(tmp_path / "a.ckpt")):
        for what in ("weights", "masks", "ages"):
            assert all(torch.equal(again[what][name], value) for name, value in undisturbed[what].items())


class SaveDelta(Callback):
    """Saves the first weights, and at the end what has changed; every rank calls this."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.base = weights_of(module)
        if trainer.is_global_zero:
            save_file(self.base, self.folder / "base.safetensors")

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        gp.delta.save(self.folder / f"{trainer.global_rank}.delta", module, self.base)


def fit_observed(strategy: str, folder: str) -> dict[str, Any]:
    callbacks = [Audit(folder), SaveDelta(folder)]
    return fit(strategy, "rows", settings={"callbacks": callbacks})


@pytest.mark.supports("audit", "delta", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_audit_and_the_delta_are_those_of_whole_weights(
    pair: ProcessPool, tmp_path: Path, strategy: str
) -> None:
    ended = pair(fit_observed, strategy, str(tmp_path))[0]
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["changed"] == 0
    assert report["intervals"] > 0
    weights = load_file(tmp_path / "base.safetensors")
    gp.delta.apply(weights, tmp_path / "0.delta")
    assert all(torch.equal(weights[name], value) for name, value in ended["weights"].items())
