"""SimSiam whose stop is declared by a policy, against one that says it in its code."""

from functools import partial

import torch
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.tasks.simsiam import SimSiam, SimSiamNetwork

POLICIES = [gp.Stop(modules="model.criterion", argument="z"), gp.Stop(modules="model.probe")]


def test_the_policies_give_the_gradients_of_the_paper() -> None:
    task = SimSiam(SimSiamNetwork(inputs=64, hidden=16, size=8), partial(torch.optim.SGD, lr=0.1))
    first, second, labels = torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8), torch.arange(6)
    model, parameters = task.model, dict(task.named_parameters())

    def by_hand():
        features = model.encoder(first)
        one, other = model.projector(features), model.projector(model.encoder(second))
        cosine = partial(functional.cosine_similarity, dim=-1)
        similar = cosine(model.predictor(one), other.detach()) + cosine(model.predictor(other), one.detach())
        return -similar.mean() / 2 + functional.cross_entropy(model.probe(features.detach()), labels)

    expected = torch.autograd.grad(by_hand(), parameters.values())
    with gp.install(task, POLICIES):
        views = model(first, second)
        loss = views.loss + functional.cross_entropy(views.probe_logits, labels)
        found = torch.autograd.grad(loss, parameters.values())
    for name, one, other in zip(parameters, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_the_spread_is_one_for_random_directions_and_zero_for_a_single_one() -> None:
    task = SimSiam(SimSiamNetwork(), partial(torch.optim.SGD, lr=0.1))
    views = task.model(torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8))
    labels = torch.zeros(4, dtype=torch.long)

    def spread(projections):
        return task._values(views._replace(projections=projections), labels)["spread"].item()

    assert 0.98 < spread(torch.randn(500, 200)) < 1.01
    assert spread(torch.ones(500, 200)) < 1e-3
