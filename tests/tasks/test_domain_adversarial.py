"""The two domains, and that a reversed gradient makes features worse for telling them apart."""

import torch

import gradpolicy as gp
from gradpolicy.tasks.domain_adversarial import DomainAdversarial, DomainNetwork


def test_a_mark_tells_the_class_in_the_source_domain_only() -> None:
    task = DomainAdversarial(DomainNetwork(), torch.optim.Adam)
    images, labels = torch.full((3, 1, 8, 8), 0.5), torch.tensor([0, 5, 9])
    source, target = task.source(images, labels), task.target(images)
    assert source[:, 0, 0].sum(-1).tolist() == [0.0, 4.0, 8.0]
    assert not target[:, 0, 0].any()
    assert (source[:, :, 1:] == 0.5).all()
    assert (target[:, :, 1:] == 0.5).all()
    assert (images == 0.5).all()


def test_a_step_along_the_reversed_gradient_raises_the_loss_of_the_domains() -> None:
    network = DomainNetwork()
    images, domains = torch.rand(16, 64), torch.arange(16).float() % 2

    def domain_loss() -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(network(images).domain_logits, domains)

    with gp.install(network, [gp.Reverse(modules="domain")]):
        before = domain_loss()
        before.backward()
    with torch.no_grad():
        for parameter in network.features.parameters():
            parameter -= 0.1 * parameter.grad
    assert domain_loss() > before
