"""Costs are measured a step, and logged at the end of an epoch."""

import pytest

import gradpolicy as gp
from gradpolicy.insight.costs import Costs
from gradpolicy.lightning.callback import GradientPolicies


def fit(model, loader, make_trainer, *callbacks, **settings):
    trainer = make_trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_what_is_logged_has_sensible_values(two_layers, loader, make_trainer) -> None:
    logged = fit(two_layers, loader, make_trainer, Costs(skip=1))
    entries = sum(parameter.numel() for parameter in two_layers.parameters())
    tensors = len(list(two_layers.parameters()))
    assert logged["cost/optimizer_bytes_peak"] == 4 * (2 * entries + tensors)
    assert logged["cost/step_cpu_milliseconds"] > 0
    assert 0 < logged["cost/step_milliseconds"] < 10_000
    assert "cost/step_milliseconds" not in fit(two_layers, loader, make_trainer, Costs(skip=4))


def test_dropped_state_is_not_counted(two_layers, loader, make_trainer) -> None:
    policy = gp.Freeze(gp.masks.Fixed("head.*"), frozen_state="drop")
    whole = fit(two_layers, loader, make_trainer, Costs(), max_epochs=1)["cost/optimizer_bytes_peak"]
    part = fit(two_layers, loader, make_trainer, Costs(), GradientPolicies({"head": policy}))
    assert part["cost/optimizer_bytes_peak"] < 0.3 * whole


def test_a_negative_skip_is_refused() -> None:
    with pytest.raises(gp.PolicyError, match=r"callbacks\.costs\.skip"):
        Costs(skip=-1)
