"""A checkpoint of another number of optimizers or schedulers is refused before anything is trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

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
    trainer.save_checkpoint(tmp_path / "theirs" / "one.ckpt")
    return tmp_path / "theirs" / "one.ckpt"


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


@pytest.mark.parametrize("own", [PolicyError, MisconfigurationException])
def test_an_error_that_is_clear_already_stays_as_it_is(checkpoint: Path, own: type[Exception]) -> None:
    with pytest.raises(own, match="in plain words"), checked_restore(checkpoint):
        raise own("in plain words")


def kept_in(folder: Path, named: Path, checkpoint: Path) -> ModelCheckpoint:
    """A callback that keeps its files in a folder; has a checkpoint name one of them."""
    kept = ModelCheckpoint(dirpath=folder)
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"][kept.state_key] = {**kept.state_dict(), "best_model_path": str(named)}
    torch.save(content, checkpoint)
    return kept


def test_a_checkpoint_for_which_this_run_would_delete_another_is_refused(
    make_trainer, loader, checkpoint: Path, tmp_path: Path
) -> None:
    kept = kept_in(tmp_path / "mine", tmp_path / "mine/precious.ckpt", checkpoint)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[CheckedResume(), kept])
    with pytest.raises(PolicyError, match=r"one\.ckpt names .*precious\.ckpt, which is not beside it"):
        trainer.fit(WithSchedulers(), loader, ckpt_path=checkpoint, weights_only=True)


@pytest.mark.parametrize(("folder", "named"), [("theirs", "theirs/a.ckpt"), ("mine", "elsewhere/a.ckpt")])
@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory .* is not empty")
def test_one_that_names_its_own_files_or_none_of_this_run_goes_on(
    make_trainer, loader, checkpoint: Path, tmp_path: Path, folder: str, named: str
) -> None:
    kept = kept_in(tmp_path / folder, tmp_path / named, checkpoint)
    trainer = make_trainer(
        max_epochs=9, max_steps=2, enable_checkpointing=True, callbacks=[CheckedResume(), kept]
    )
    trainer.fit(WithSchedulers(), loader, ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == 2


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
