"""Costs are measured a step, and logged at the end of an epoch."""

import pytest

import gradpolicy as gp
from gradpolicy.insight.costs import Costs


def test_what_is_logged_has_sensible_values(fit, two_layers) -> None:
    logged = fit(Costs(skip=1)).callback_metrics
    entries = sum(parameter.numel() for parameter in two_layers.parameters())
    tensors = len(list(two_layers.parameters()))
    assert logged["cost/optimizer_bytes_peak"] == 4 * (2 * entries + tensors)
    assert logged["cost/step_cpu_milliseconds"] > 0
    assert 0 < logged["cost/step_milliseconds"] < 10_000
    assert "cost/step_milliseconds" not in fit(Costs(skip=4)).callback_metrics


def test_dropped_state_is_not_counted(fit) -> None:
    policy = gp.Freeze(gp.masks.Fixed("head.*"), frozen_state="drop")
    whole = fit(Costs()).callback_metrics
    part = fit(Costs(), gp.GradientPolicies({"head": policy})).callback_metrics
    assert part["cost/optimizer_bytes_peak"] < 0.3 * whole["cost/optimizer_bytes_peak"]


def test_a_negative_skip_is_refused() -> None:
    with pytest.raises(gp.PolicyError, match=r"callbacks\.costs\.skip"):
        Costs(skip=-1)
