"""The audit: what holds is counted, and each planted fault is found."""

import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.insight.audit import Audit

FULL = {"entries": None}


def half(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == 0).reshape(parameter.shape)


def frozen(frozen_state="keep"):
    return {"half": gp.Freeze(half, params="trunk.*", frozen_state=frozen_state)}


def turning(every=1):
    return {"turns": gp.Freeze(gp.masks.Random(0.5, every=every), params="trunk.*", frozen_state="keep")}


@pytest.fixture
def fit(two_layers, loader, make_trainer, tmp_path):
    """Trains with an audit and gives what it wrote."""

    def run(policies, *others, audit=(), max_epochs=3, model=two_layers, ckpt_path=None, **settings):
        watcher = Audit(tmp_path, **dict(audit))
        callbacks = [watcher, gp.GradientPolicies(policies), *others]
        trainer = make_trainer(callbacks=callbacks, max_epochs=max_epochs, **settings)
        trainer.fit(model, loader, ckpt_path=ckpt_path, weights_only=True)
        return written(tmp_path)

    return run


def written(directory):
    return json.loads((directory / "audit.json").read_text())


class Meddler(Callback):
    """Does something to the model after its fourth batch."""

    def __init__(self, act, hook="on_train_batch_end", at=3):
        self.act, self.at, self.batches = act, at, 0
        setattr(self, hook, self.do)

    def do(self, trainer, pl_module, *_):
        if self.batches == self.at:
            with torch.no_grad():
                self.act(trainer, pl_module)
        self.batches += 1


def write_one(trainer, pl_module):
    pl_module.trunk[0].weight[0, 1] += 1e-3


# ---- what holds


@pytest.mark.parametrize("state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("audit", [FULL, {}])
def test_frozen_entries_are_found_unchanged(fit, state, audit):
    report = fit(frozen(state), audit=audit)
    assert report["intervals"] > 0
    assert report["entries"] > 0
    assert (report["changed"], report["differences"]) == (0, [])
    assert report["sampled"] is (not audit)


def test_all_entries_of_each_interval_are_compared(fit, capsys):
    report = fit(turning(every=4), audit={**FULL, "every": 100})
    # Twelve updates are three intervals of four tensors.
    assert report["intervals"] == 3 * 4
    assert report["share"] == 1.0
    assert "frozen entries: 12 intervals, 0 changed" in capsys.readouterr().out
