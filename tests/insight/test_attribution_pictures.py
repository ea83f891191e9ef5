"""The callback draws what the run's policies give, and changes nothing of the model."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from PIL import Image
from process_pool import ProcessPool, here
from runs import STRATEGIES
from torch import Tensor
from torch.utils.data import DataLoader

import gradpolicy as gp
from gradpolicy.insight import attribution_pictures
from gradpolicy.insight.attribution import integrated
from gradpolicy.insight.attribution_pictures import AttributionPictures
from gradpolicy.insight.pictures import picture_grid
from gradpolicy.tasks import Classifier, DigitsDataModule, QuantizedConvNet

POLICIES = {
    "guided": gp.Guided(when=gp.When(phases=("test",))),
    "quantizer": gp.StraightThrough(ops=["round"], when=gp.When(phases=("fit", "test"))),
    "probe": gp.Stop(modules="model.probe"),
}


@pytest.fixture
def module() -> Classifier:
    return Classifier(QuantizedConvNet(width=4), partial(torch.optim.SGD, lr=0.1))


def watched():
    """Keeps what the callback draws within a block."""
    return patch.object(attribution_pictures, "picture_grid", wraps=picture_grid)


def attributions(grid: Mock) -> Tensor:
    return torch.stack([sample.attribution for sample in grid.call_args.args[0]])


def give_gradients(trainer: Trainer, pl_module: LightningModule) -> None:
    for parameter in pl_module.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_a_test_run_leaves_a_grid_and_the_model_as_it_was(
    module: Classifier, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    # Lightning takes gradients away before.
    gradients = LambdaCallback(on_test_start=give_gradients)
    trainer = make_trainer(callbacks=[gp.GradientPolicies(POLICIES), gradients, AttributionPictures(count=6)])
    trainer.test(module, DigitsDataModule(batch_size=4), verbose=False)
    assert np.asarray(Image.open(tmp_path / "pictures" / "guided.png").convert("L")).std() > 5
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())


def test_the_attribution_is_that_of_the_policies_of_the_run(module, make_trainer) -> None:
    data = DigitsDataModule(batch_size=4)
    trainer = make_trainer(callbacks=[gp.GradientPolicies(POLICIES), AttributionPictures(count=6)])
    with watched() as grid:
        trainer.test(module, data, verbose=False)
    samples, title, _ = grid.call_args.args
    assert re.search(r"insertion 0\.\d\d \(random order 0\.\d\d\), deletion 0\.\d\d \(random order", title)
    images, labels = (part[:6] for part in data.test_set.tensors)
    expected = integrated(module, images, policies=[gp.StraightThrough(ops=["round"]), gp.Guided()])
    assert expected.any()
    torch.testing.assert_close(attributions(grid), expected)
    assert [sample.truth for sample in samples] == [str(int(label)) for label in labels]


def attributions_of_ranks(strategy: str, folder: str) -> Tensor:
    """Tests on all ranks, and gives the attributions that this one has computed."""
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="gpu" if here().type == "cuda" else "cpu",
        devices=dist.get_world_size(),
        strategy=STRATEGIES[strategy](),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=[gp.GradientPolicies(POLICIES), AttributionPictures(count=4)],
    )
    model = Classifier(QuantizedConvNet(width=4), partial(torch.optim.SGD, lr=0.1))
    with watched() as grid:
        trainer.test(model, DigitsDataModule(batch_size=2), verbose=False)
    return attributions(grid).cpu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_is_attributed_as_a_whole_one(pair: ProcessPool, tmp_path: Path) -> None:
    """All ranks together gather a sharded model: where one rank alone runs it, the run ends in an error."""
    whole = pair(attributions_of_ranks, "ddp", str(tmp_path / "whole"))
    sharded = pair(attributions_of_ranks, "fsdp2", str(tmp_path / "sharded"))
    for expected, found in zip(whole, sharded, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected)
    assert (tmp_path / "sharded/pictures/guided.png").is_file()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("guidd", "'guidd': the run has no such policy; did you mean 'guided'"),
        ("probe", "'probe': it does not hold in the phase 'test'"),
    ],
)
def test_a_policy_that_is_absent_or_does_not_hold_is_refused(
    policy: str, message: str, module: Classifier, make_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_trainer(callbacks=[gp.GradientPolicies(POLICIES), AttributionPictures(policy)])
    with pytest.raises(gp.PolicyError, match=message):
        trainer.test(module, DigitsDataModule(), verbose=False)
    with pytest.raises(gp.PolicyError, match=r"count: must be .*, got 0"):
        AttributionPictures(count=0)


class OfNamed(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch["image"])


def test_data_without_images_are_refused_where_pictures_are_required(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    module = OfNamed(QuantizedConvNet(width=4), partial(torch.optim.SGD, lr=0.1))
    data = DataLoader([{"image": torch.rand(1, 8, 8)}] * 4, batch_size=2)
    policies = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=("test",)))})
    with pytest.raises(gp.PolicyError, match="AttributionPictures: the data holds no images"):
        make_trainer(callbacks=[policies, AttributionPictures()]).test(module, data, verbose=False)
    trainer = make_trainer(callbacks=[policies, AttributionPictures(required=False)])
    with pytest.warns(UserWarning, match="holds no images.*there are no pictures"):
        trainer.test(module, data, verbose=False)
    assert not (tmp_path / "pictures").exists()
