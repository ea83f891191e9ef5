"""Gradients that nobody needs are turned off, and nothing else."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.freezing.requires_grad import ComputedGradients, guard_group_norms
from tests.fixtures import quiet_trainer
from tests.freezing.conftest import freezer_of


def off(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.fixture
def switch(stack) -> ComputedGradients:
    return ComputedGradients(stack, [set(stack.parameters())])


def freeze(switch: ComputedGradients, idle: set[str]) -> None:
    switch.update(dict.fromkeys(idle, False), set(), changed=True)


def test_exactly_the_idle_ones_are_off(stack, switch) -> None:
    for idle in ({"head.bias"}, {"head.weight", "embed.weight"}, set()):
        freeze(switch, idle)
        assert off(stack) == idle


def test_what_others_turned_off_stays_off(stack, switch) -> None:
    stack.head.bias.requires_grad_(False)
    freeze(switch, {"head.bias", "head.weight"})
    freeze(switch, set())
    assert off(stack) == {"head.bias"}
    freeze(switch, {"head.weight"})
    switch.restore()
    assert off(stack) == {"head.bias"}


def test_something_is_always_left_for_the_backward_pass(stack, switch) -> None:
    every = {name for name, _ in stack.named_parameters()}
    freeze(switch, {"head.bias"})
    freeze(switch, every)
    assert off(stack) == set()
    stack.head.bias.requires_grad_(False)
    freeze(switch, every - {"head.bias"})
    assert off(stack) == {"head.bias"}


def test_a_stale_gradient_goes_when_its_tensor_freezes(stack, switch) -> None:
    for parameter in stack.parameters():
        parameter.grad = torch.ones_like(parameter)
    freeze(switch, {"head.weight"})
    assert stack.head.weight.grad is None
    assert stack.head.bias.grad is not None


# ---- reentrant checkpoints behind frozen layers: nothing in them would get a gradient


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.use_reentrant)
        return self.blocks[1](x)


EMBEDDING = gp.Freeze(params="embed.*")


def train_behind_frozen_embedding(model: nn.Module, steps: int = 2, policy=EMBEDDING, **options) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gp.training(model, optimizer, [policy], **options) as optimizer:
        for _ in range(steps):
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.arange(5))  # no graph, but not for the lack of a gradient
            optimizer.zero_grad()


# Of the second no loss requires a gradient, which is an error of torch.
@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (EMBEDDING, PolicyError, r"blocks\.0\.weight, .* got no gradient: .*use_reentrant=False"),
        (gp.Train(params="blocks.0.*"), RuntimeError, "does not require grad"),
    ],
)
def test_a_reentrant_checkpoint_behind_frozen_layers_is_refused(
    policy: gp.Freeze, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_behind_frozen_embedding(Checkpointed(use_reentrant=True), policy=policy)
    callback = gp.GradientPolicies({"own": policy}, layers=False)
    with pytest.raises(error, match=message):
        fit_behind(Checkpointed(use_reentrant=True), callback)


def fit_behind(model: nn.Module, callback: gp.GradientPolicies) -> None:
    module = LightningModule()
    module.blocks, module.embed = model.blocks, model.embed
    module.training_step = lambda batch: model(batch).square().sum()
    module.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    quiet_trainer(callbacks=[callback]).fit(module, torch.arange(5)[None])


def test_the_plan_takes_reentrant_checkpoints() -> None:
    model = Checkpointed(use_reentrant=True)
    planned = gp.plan(model, [gp.Scale(0.5, modules="blocks.1")], lambda copy: copy(torch.arange(5)).sum())
    assert (planned.warnings, planned.without_gradient) == ((), ())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("use_reentrant", "options"), [(False, {}), (True, {"toggle_requires_grad": False})])
def test_checkpoints_behind_frozen_layers_train(use_reentrant: bool, options: dict) -> None:
    model = Checkpointed(use_reentrant)
    before = model.blocks[0].weight.detach().clone()
    train_behind_frozen_embedding(model, **options)
    assert not torch.equal(model.blocks[0].weight, before)


def test_a_model_that_says_that_it_checkpoints_reentrantly_trains() -> None:
    """As those of transformers do."""
    model = Checkpointed(use_reentrant=True)
    model._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    before = model.blocks[0].weight.detach().clone()
    train_behind_frozen_embedding(model)
    assert not torch.equal(model.blocks[0].weight, before)
    assert model.embed.weight.requires_grad


# ---- GroupNorm behind frozen layers: torch would crash

NORMS = {
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
}


def frozen_convolution(norm, memory_format, bias):
    """Freezes the convolution before a norm that trains, and takes a step."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), NORMS[norm](), nn.Conv2d(4, 2, 3))
    model.to(memory_format=memory_format)
    _, freezer = freezer_of(model, {"first": gp.Freeze(gp.masks.Fixed(False), params="0.*")})
    freezer.begin_step(0)
    model(torch.ones(2, 3, 8, 8).to(memory_format=memory_format)).square().sum().backward()
    return model, freezer


def test_group_norm_behind_frozen_layers_gets_the_gradients_of_the_other_memory_format():
    """Where the guard fails, torch ends the process."""
    grads = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model, freezer = frozen_convolution("group", memory_format, False)
        assert model[0].weight.grad is None
        grads.append([parameter.grad for parameter in model[1:].parameters()])
        freezer.restore()
        assert not model[1]._forward_pre_hooks
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "image",
    [
        torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(4, 8, 3, 3).to(memory_format=torch.channels_last)[::2, :4],
        torch.ones(2, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d),
    ],
)
def test_the_guard_acts_where_torch_crashes(image):
    norm, seen = nn.GroupNorm(2, 4), []
    (handle,) = guard_group_norms(norm)
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    norm(image).square().sum().backward()
    handle.remove()
    assert seen == [True]
