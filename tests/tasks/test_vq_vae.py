"""A VQ-VAE whose gradients are declared by policies, against one that says them in its code."""

from functools import partial

import torch
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.tasks.vq_vae import VQVAE, VectorQuantizedAutoencoder

POLICIES = {
    "codes": gp.StraightThrough(modules="model.quantizer", output="codes"),
    "codebook": gp.Stop(modules="model.quantizer.codebook_loss", argument="target"),
    "commitment": gp.Stop(modules="model.quantizer.commitment_loss", argument="target"),
}


def make():
    torch.manual_seed(0)
    return VQVAE(VectorQuantizedAutoencoder(width=4, vectors=8, size=4), partial(torch.optim.SGD, lr=0.1))


def by_hand(task, images):
    """The loss as the paper writes it, with detach in every place."""
    model = task.model
    encoded = model.encoder(images).movedim(1, -1)
    quantizer = model.quantizer
    indices = torch.cdist(encoded.flatten(0, -2), quantizer.codebook).argmin(-1)
    codes = quantizer.codebook[indices].view_as(encoded)
    passed = encoded + (codes - encoded).detach()
    return (
        functional.mse_loss(model.decoder(passed.movedim(-1, 1)), images)
        + functional.mse_loss(codes, encoded.detach())
        + 0.25 * functional.mse_loss(encoded, codes.detach())
    )


def test_the_policies_give_the_gradients_of_the_paper() -> None:
    task, images = make(), torch.rand(6, 1, 8, 8)
    parameters = dict(task.named_parameters())
    expected = torch.autograd.grad(by_hand(task, images), parameters.values())
    with gp.install(task, POLICIES):
        loss = task._assess((images, images))["loss"]
        found = torch.autograd.grad(loss, parameters.values())
    torch.testing.assert_close(loss, by_hand(task, images))
    for name, one, other in zip(parameters, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_without_them_the_decoder_does_not_reach_the_encoder() -> None:
    task, images = make(), torch.rand(6, 1, 8, 8)
    reconstruction = task._assess((images, images))["reconstruction"]
    weights = task.model.encoder[0].weight
    assert torch.autograd.grad(reconstruction, weights, allow_unused=True) == (None,)
