"""Curvature is logged at the steps that count, and training goes on as if nothing had been measured."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torchmetrics import MeanMetric

import gradpolicy as gp
from gradpolicy.insight.log_curvature import LogCurvature


@pytest.fixture
def logged(fit):
    """Trains under callbacks, and gives what is logged of the curvature at each step."""

    def run(*callbacks, **settings):
        rows = {}

        def keep(trainer, *_):
            found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("curvature")}
            rows[trainer.global_step] = found

        fit(*callbacks, LambdaCallback(on_train_batch_end=keep), **settings)
        return rows

    return run


@pytest.mark.parametrize("policies", [{}, {"pass": gp.StraightThrough(ops=["round"])}])
def test_what_is_logged_is_the_curvature_under_the_runs_policies(logged, policies):
    expected = {}

    class Reference(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                generator = torch.Generator().manual_seed(7)
                parameters = dict(pl_module.named_parameters())
                found = gp.curvature.trace(
                    lambda: pl_module.training_step(batch, 0), parameters, 4, generator
                )
                expected["row"] = [found.value, found.standard_error]

    measured = LogCurvature(every=2, quantities=["trace"], samples=4, seed=7)
    callbacks = [gp.GradientPolicies(policies)] if policies else []
    rows = logged(*callbacks, Reference(), measured)
    assert rows[1] == {}
    assert [*rows[2].values()] == pytest.approx(expected["row"])
    assert rows[3] == rows[2] != rows[4]


def test_all_quantities_are_logged_once_an_effective_step(logged):
    rows = logged(LogCurvature(every=1, samples=2), accumulate_grad_batches=2)
    assert rows[0] == {}
    assert len(rows[1]) == 6
    assert set(rows) == {0, 1, 2}


def test_training_is_as_without_it(fit, two_layers):
    class Counting(type(two_layers)):
        def __init__(self):
            super().__init__()
            self.seen = MeanMetric()
            self.norm = nn.BatchNorm1d(4)

        def training_step(self, batch, batch_idx):
            loss = super().training_step([nn.functional.dropout(self.norm(batch[0])), batch[1]], batch_idx)
            self.seen.update(loss.detach())
            return loss

    plain = Counting()
    measured = copy.deepcopy(plain)
    for model, callbacks in ((plain, []), (measured, [LogCurvature(every=1, samples=2)])):
        torch.manual_seed(4)
        fit(*callbacks, model=model)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, measured.state_dict()[name]), name
    assert float(plain.seen.compute()) == float(measured.seen.compute())
    assert "log" not in vars(measured)


def test_a_module_that_optimizes_by_hand_is_refused(fit, two_layers):
    two_layers.automatic_optimization = False
    with pytest.raises(gp.PolicyError, match=r"callbacks\.curvature: TwoLayers optimizes by hand"):
        fit(LogCurvature())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, r"callbacks\.curvature\.every"),
        ({"samples": 1}, r"callbacks\.curvature\.samples"),
        (
            {"quantities": ["norm"]},
            r"callbacks\.curvature\.quantities: unknown value 'norm'; .*'frobenius_norm'",
        ),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(gp.PolicyError, match=message):
        LogCurvature(**settings)
