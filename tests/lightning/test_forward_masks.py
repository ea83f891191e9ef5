"""Masks in the forward pass under Lightning: evaluation and checkpoints see them, a resume goes on."""

import copy
import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.insight.audit import Audit

PASSED = {"through": gp.StraightThrough(ops=["round"])}


class Watch(Callback):
    """Notes how many weights the validation sees, and saves a checkpoint after each epoch."""

    def __init__(self, folder=None):
        self.folder, self.seen = folder, []

    def on_validation_end(self, trainer, module):
        weight = module.get_parameter("trunk.0.weight")
        self.seen.append(float((weight != 0).float().mean()))
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.fixture
def fit(two_layers, loader, make_trainer):
    def run(folder=None, resumed=None, callbacks=(), more=None, log=False, **settings):
        model, watch = copy.deepcopy(two_layers), Watch(folder)
        source = gp.masks.TopK(0.5, by="magnitude", within="tensor", every=3)
        policies = {"seen": gp.ForwardMask(source, params="*.weight", decay=0.01), **PASSED, **(more or {})}
        model.validation_step = lambda batch, batch_idx: None
        given = [gp.GradientPolicies(policies, log=log), watch, *callbacks]
        trainer = make_trainer(max_epochs=4, callbacks=given, **settings)
        trainer.fit(model, loader, loader, ckpt_path=resumed, weights_only=True)
        return model, watch.seen

    return run


@pytest.mark.supports("forward masks", loop="lightning")
def test_a_resumed_run_ends_with_the_same_bits_and_checkpoints_hold_masked_weights(fit, tmp_path) -> None:
    model, seen = fit(tmp_path)
    assert seen == pytest.approx([0.5] * 4, abs=0.1)
    saved = torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert float((saved["trunk.0.weight"] != 0).float().mean()) == pytest.approx(0.5, abs=0.1)
    resumed, _ = fit(resumed=tmp_path / "1.ckpt")
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_clipping_and_accumulation_work_on_masked_weights(fit) -> None:
    _, seen = fit(gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert seen == pytest.approx([0.5] * 4, abs=0.1)


def test_measurements_and_the_audit_go_on_beside_it(fit, tmp_path) -> None:
    """One parameter has a freeze policy too, the others have none; the audit sees no frozen entry change."""
    source = gp.masks.TopK(0.5, by="magnitude", within="tensor", every=3, stop=4)
    _, seen = fit(
        callbacks=[Audit(tmp_path)],
        more={"frozen": gp.Freeze(source, params="trunk.0.weight")},
        log=True,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    assert seen == pytest.approx([0.5] * 4, abs=0.1)
    assert json.loads((tmp_path / "audit.json").read_text())["changed"] == 0


def test_averages_of_weights_are_refused(fit) -> None:
    with pytest.raises(PolicyError, match=r"policy\.seen: WeightAveraging averages over steps"):
        fit(callbacks=[WeightAveraging()])
