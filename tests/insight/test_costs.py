"""Costs are measured a step, and logged at the end of an epoch."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.insight import costs
from gradpolicy.insight.costs import Costs, optimizer_bytes
from gradpolicy.lightning.callback import GradientPolicies


class Clock:
    """Says a second more each time it is asked."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def fit(model, loader, make_trainer, *callbacks, **settings):
    trainer = make_trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_times_are_means_over_the_steps_that_count(two_layers, loader, make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(costs.time, "perf_counter", Clock(2.0))
    monkeypatch.setattr(costs.time, "process_time", Clock(0.5))
    measured = Costs(skip=1)
    for index in range(4):
        measured.on_train_batch_start()
        costs.time.perf_counter.step = 2.0 + index
        measured.on_train_batch_end(type("Trainer", (), {"optimizers": []})())
    assert measured.batches == 4
    assert measured.seconds == pytest.approx(3 + 4 + 5)
    assert measured.cpu_seconds == pytest.approx(3 * 0.5)


def test_what_is_logged_has_sensible_values(two_layers, loader, make_trainer) -> None:
    logged = fit(two_layers, loader, make_trainer, Costs(skip=1))
    entries = sum(parameter.numel() for parameter in two_layers.parameters())
    tensors = len(list(two_layers.parameters()))
    assert logged["cost/optimizer_bytes_peak"] == 4 * (2 * entries + tensors)
    assert logged["cost/step_cpu_milliseconds"] > 0
    assert 0 < logged["cost/step_milliseconds"] < 10_000


def test_too_few_steps_give_no_times(two_layers, loader, make_trainer) -> None:
    logged = fit(two_layers, loader, make_trainer, Costs(skip=4))
    assert "cost/step_milliseconds" not in logged
    assert "cost/optimizer_bytes_peak" in logged


def test_dropped_state_is_not_counted(two_layers, loader, make_trainer) -> None:
    policy = gp.Freeze(gp.masks.Fixed("head.*"), frozen_state="drop")
    whole = fit(two_layers, loader, make_trainer, Costs(), max_epochs=1)["cost/optimizer_bytes_peak"]
    part = fit(two_layers, loader, make_trainer, Costs(), GradientPolicies({"head": policy}))
    assert part["cost/optimizer_bytes_peak"] < 0.3 * whole


def test_bytes_are_those_of_every_state_tensor() -> None:
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight])
    assert optimizer_bytes(optimizer) == 0
    optimizer.step()
    assert optimizer_bytes(optimizer) == 2 * 80 + 4


def test_a_negative_skip_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"callbacks\.costs\.skip"):
        Costs(skip=-1)
