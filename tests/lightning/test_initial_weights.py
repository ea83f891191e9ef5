"""A run may start from the weights of another."""

from pathlib import Path

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.initial_weights import InitialWeights


@pytest.fixture
def checkpoint(two_layers, tmp_path: Path) -> Path:
    path = tmp_path / "base.ckpt"
    torch.save({"state_dict": {k: torch.full_like(v, 0.5) for k, v in two_layers.state_dict().items()}}, path)
    return path


def test_training_starts_from_the_checkpoints_weights(two_layers, loader, make_trainer, checkpoint) -> None:
    trainer = make_trainer(callbacks=[InitialWeights(str(checkpoint))], max_steps=0)
    trainer.fit(two_layers, loader)
    assert all(bool((weight == 0.5).all()) for weight in two_layers.state_dict().values())
    assert trainer.global_step == 0


def test_testing_does_not_load_them(two_layers, loader, make_trainer, checkpoint) -> None:
    before = {name: weight.clone() for name, weight in two_layers.state_dict().items()}
    make_trainer(callbacks=[InitialWeights(str(checkpoint))]).test(two_layers, loader, verbose=False)
    assert all(torch.equal(before[name], weight) for name, weight in two_layers.state_dict().items())


def test_no_path_warns_that_the_weights_are_fresh(two_layers, loader, make_trainer) -> None:
    with pytest.warns(UserWarning, match="fresh weights"):
        make_trainer(callbacks=[InitialWeights()], max_steps=1).fit(two_layers, loader)


def test_another_models_checkpoint_is_refused(two_layers, loader, make_trainer, tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"head.weight": torch.zeros(3, 8)}}, path)
    trainer = make_trainer(callbacks=[InitialWeights(str(path))])
    with pytest.raises(PolicyError, match=r"callbacks\.initial_weights\.path: .* is of another model"):
        trainer.fit(two_layers, loader)


def test_an_absent_file_is_named(two_layers, loader, make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=[InitialWeights(str(tmp_path / "nothing.ckpt"))])
    with pytest.raises(PolicyError, match=r"callbacks\.initial_weights\.path: .*nothing\.ckpt is not a file"):
        trainer.fit(two_layers, loader)
