"""Tasks whose stops are declared by policies have the gradients of their papers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.tasks.byol import BYOL, BYOLNetwork
from gradpolicy.tasks.domain_adversarial import DomainAdversarial, DomainNetwork
from gradpolicy.tasks.simsiam import SimSiam, SimSiamNetwork, spread
from gradpolicy.tasks.task import Task
from gradpolicy.tasks.vq_vae import VQVAE, VectorQuantizedAutoencoder

sgd = partial(torch.optim.SGD, lr=0.1)
POLICIES = {
    SimSiam: {
        "criterion": gp.Stop(modules="model.criterion", argument="z"),
        "probe": gp.Stop(modules="model.probe"),
    },
    VQVAE: {
        "codes": gp.StraightThrough(modules="model.quantizer", output="codes"),
        "codebook": gp.Stop(modules="model.quantizer.codebook_loss", argument="target"),
        "commitment": gp.Stop(modules="model.quantizer.commitment_loss", argument="target"),
    },
}


def simsiam(task: Task, images: Tensor, labels: Tensor) -> Tensor:
    """The loss as the paper writes it, for two equal views, with detach in every place."""
    features = task.model.encoder(images)
    one, other = task.model.projector(features), task.model.projector(task.model.encoder(images))
    cosine = partial(functional.cosine_similarity, dim=-1)
    predictor = task.model.predictor
    similar = cosine(predictor(one), other.detach()) + cosine(predictor(other), one.detach())
    return -similar.mean() / 2 + functional.cross_entropy(task.model.probe(features.detach()), labels)


def vq_vae(task: Task, images: Tensor, labels: Tensor) -> Tensor:
    """The loss as the paper writes it, with detach in every place."""
    model = task.model
    encoded = model.encoder(images).movedim(1, -1)
    indices = torch.cdist(encoded.flatten(0, -2), model.quantizer.codebook).argmin(-1)
    codes = model.quantizer.codebook[indices].view_as(encoded)
    passed = encoded + (codes - encoded).detach()
    return (
        functional.mse_loss(model.decoder(passed.movedim(-1, 1)), images)
        + functional.mse_loss(codes, encoded.detach())
        + 0.25 * functional.mse_loss(encoded, codes.detach())
    )


@pytest.mark.parametrize(
    ("task", "by_hand"),
    [
        (SimSiam(SimSiamNetwork(hidden=16, size=8), sgd), simsiam),
        (VQVAE(VectorQuantizedAutoencoder(width=4, vectors=8, size=4), sgd), vq_vae),
    ],
)
def test_the_policies_give_the_gradients_of_the_paper(task: Task, by_hand: Callable[..., Tensor]) -> None:
    # In evaluation SimSiam compares a view with itself; the normalisation is the training's.
    task.training = False
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    parameters = dict(task.named_parameters())
    expected_loss = by_hand(task, images, labels)
    expected = torch.autograd.grad(expected_loss, parameters.values())
    with gp.install(task, POLICIES[type(task)]):
        loss, _ = task.assess((images, labels))
        found = torch.autograd.grad(loss, parameters.values())
    torch.testing.assert_close(loss, expected_loss)
    for name, one, other in zip(parameters, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_without_policies_the_decoder_does_not_reach_the_encoder() -> None:
    task, images = VQVAE(VectorQuantizedAutoencoder(width=4, vectors=8, size=4), sgd), torch.rand(6, 1, 8, 8)
    reconstruction = task.assess((images, images))[1]["reconstruction"]
    weights = task.model.encoder[0].weight
    assert torch.autograd.grad(reconstruction, weights, allow_unused=True) == (None,)


def test_the_spread_is_one_for_random_directions_and_zero_for_a_single_one() -> None:
    assert 0.98 < spread(torch.randn(500, 200)) < 1.01
    assert spread(torch.ones(500, 200)) < 1e-3


def test_byols_copy_moves_by_the_share_that_the_momentum_leaves() -> None:
    task = BYOL(BYOLNetwork(), sgd, momentum=0.75)
    model = task.model
    before = model.target[1].weight.detach().clone()
    torch.testing.assert_close(before, model.projector.weight.detach())
    with torch.no_grad():
        model.projector.weight.add_(1.0)
    task.on_train_batch_end(None, None, 0)
    torch.testing.assert_close(model.target[1].weight.detach(), before + 0.25)


def test_no_gradient_goes_into_byols_copy_under_the_policy() -> None:
    model, images = BYOLNetwork(), torch.rand(8, 1, 8, 8)
    with gp.install(model, [gp.Stop(modules="target", at="output")]):
        model(images, images.flip(-1)).loss.backward()
    assert all(parameter.grad is None for parameter in model.target.parameters())
    assert model.encoder[1].weight.grad.any()
    model(images, images.flip(-1)).loss.backward()
    assert any(parameter.grad.any() for parameter in model.target.parameters() if parameter.grad is not None)


def test_a_mark_shows_the_class_in_the_source_domain_only() -> None:
    task = DomainAdversarial(DomainNetwork(), torch.optim.Adam)
    images, labels = torch.full((3, 1, 8, 8), 0.5), torch.tensor([0, 5, 9])
    source, target = task.source(images, labels), task.target(images)
    assert source[:, 0, 0].sum(-1).tolist() == [0.0, 4.0, 8.0]
    assert not target[:, 0, 0].any()
    assert all((part == 0.5).all() for part in (source[:, :, 1:], target[:, :, 1:], images))
