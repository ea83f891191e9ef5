"""A checkpoint of another number of optimizers or schedulers is refused before anything is trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checked_resume import CheckedResume, checked_restore
from tests.conftest import TwoLayers


class WithSchedulers(TwoLayers):
    """So many schedulers on its one optimizer."""

    schedulers = 1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(self.schedulers)]


@pytest.fixture
def checkpoint(make_trainer: Callable[..., Trainer], loader, tmp_path: Path) -> Path:
    trainer = make_trainer(max_epochs=9, max_steps=1)
    trainer.fit(WithSchedulers(), loader)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_the_same_number_goes_on(make_trainer, loader, checkpoint: Path) -> None:
    trainer = make_trainer(max_epochs=9, max_steps=2, callbacks=[CheckedResume()])
    trainer.fit(WithSchedulers(), loader, ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == 2


def test_another_number_is_refused(make_trainer, loader, checkpoint: Path) -> None:
    model = WithSchedulers()
    model.schedulers = 2
    before = model.head.weight.clone()
    trainer = make_trainer(max_epochs=9, max_steps=2, callbacks=[CheckedResume()])
    with pytest.raises(PolicyError, match=r"one\.ckpt holds 1 lr_schedulers, and this run needs 2:"):
        trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == 1
    assert not torch.equal(model.head.weight, before)  # restored, not trained


def test_a_file_that_is_no_checkpoint_is_refused_before_it_is_restored(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("no checkpoint")
    with pytest.raises(PolicyError, match=r"a\.ckpt"), checked_restore(tmp_path / "a.ckpt"):
        raise AssertionError("restored")


@pytest.mark.parametrize("named", [True, False])
def test_an_error_that_restoring_did_not_cause_stays_as_it_is(checkpoint: Path, named: bool) -> None:
    with pytest.raises(KeyError, match="another"), checked_restore(checkpoint if named else None):
        raise KeyError("another")


def test_a_state_that_cannot_be_restored_is_named(make_trainer, loader, checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["optimizer_states"][0]["param_groups"] = []
    torch.save(content, checkpoint)
    trainer = make_trainer(max_epochs=9, max_steps=2, callbacks=[CheckedResume()])
    with (
        pytest.raises(PolicyError, match=r"one\.ckpt holds a state of another kind \(.*parameter groups"),
        checked_restore(checkpoint),
    ):
        trainer.fit(WithSchedulers(), loader, ckpt_path=checkpoint, weights_only=True)
