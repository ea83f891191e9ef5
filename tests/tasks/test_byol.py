"""BYOL: its copy moves as the formula says, and by nothing else where the policy holds."""

import torch

import gradpolicy as gp
from gradpolicy.tasks.byol import BYOL, BYOLNetwork


def test_the_copy_moves_by_the_share_that_the_momentum_leaves() -> None:
    task = BYOL(BYOLNetwork(), torch.optim.Adam, momentum=0.75)
    model = task.model
    before = model.target[1].weight.detach().clone()
    torch.testing.assert_close(before, model.projector.weight.detach())
    with torch.no_grad():
        model.projector.weight.add_(1.0)
    task.on_train_batch_end(None, None, 0)
    torch.testing.assert_close(model.target[1].weight.detach(), before + 0.25)


def test_no_gradient_goes_into_the_copy_under_the_policy() -> None:
    model, images = BYOLNetwork(), torch.rand(8, 1, 8, 8)
    with gp.install(model, [gp.Stop(modules="target", at="output")]):
        model(images, images.flip(-1)).loss.backward()
    assert all(parameter.grad is None for parameter in model.target.parameters())
    assert model.encoder[1].weight.grad.any()
    model(images, images.flip(-1)).loss.backward()
    assert any(parameter.grad.any() for parameter in model.target.parameters() if parameter.grad is not None)
