"""Under every rule an entry moves as the optimizer itself would move it alone, over its active steps."""

import functools

import pytest
import torch
from pytorch_optimizer import Lion

import gradpolicy as gp
from gradpolicy.optim.update_rules import rule_for
from tests.optim.alone import FROZEN_STATES, WITH_RULE, PutBack, run_alone, saved_and_loaded

VARIANTS = {
    "adamw betas": (torch.optim.AdamW, {"betas": (0.6, 0.8)}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop centered": (torch.optim.RMSprop, {"centered": True, "weight_decay": 0.1}),
    "rmsprop momentum": (torch.optim.RMSprop, {"momentum": 0.5}),
    "rmsprop both": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adagrad decay": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "nadamw": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam adapting": (torch.optim.RAdam, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    "lion coupled": (Lion, {"weight_decay": 0.1, "weight_decouple": False, "maximize": True}),
}
"""Settings that make a rule take another way."""
KINDS = {
    **{name: (kind, {}) for name, kind in WITH_RULE.items()},
    **{f"{name} all": (kind, {"weight_decay": 0.1, "maximize": True}) for name, kind in WITH_RULE.items()},
    **VARIANTS,
}
KINDS = {name: (kind, {"lr": 0.1, **settings}) for name, (kind, settings) in KINDS.items()}
SHAPES = [(4, 3), (4, 1), (1, 3), (1, 1), (4, 3), (), (4, 3)]


def course():
    """Masks of every shape, each held for three steps, and a gradient a step."""
    masks = [mask for shape in SHAPES for mask in [torch.rand(shape) < 0.5] * 3]
    return masks, [torch.randn(4, 3, dtype=torch.float64) for _ in masks]


def follow(optimizer, weight, masks, gradients):
    for mask, gradient in zip(masks, gradients, strict=True):
        optimizer.set_mask(weight, mask)
        frozen, before = ~mask.expand(weight.shape), weight.detach().clone()
        weight.grad = gradient.masked_fill(frozen, torch.nan)
        optimizer.step()
        assert torch.equal(weight.detach()[frozen], before[frozen])


def check_alone(kind, settings, frozen_state, dtype=torch.float64, atol=1e-12, rtol=1e-12):
    """Compare with the optimizer on each entry alone."""
    start, (masks, gradients) = torch.randn(4, 3).to(dtype), course()
    # In float16 the second moment of a small gradient underflows, in torch too.
    gradients = [(gradient + gradient.sign()).to(dtype) for gradient in gradients]
    weight = torch.nn.Parameter(start.clone())
    follow(gp.MaskedOptimizer(kind([weight], **settings), frozen_state), weight, masks, gradients)
    expected = run_alone(kind, settings, start, gradients, masks, frozen_state)
    torch.testing.assert_close(weight.detach(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
@pytest.mark.parametrize("name", KINDS)
def test_each_entry_moves_as_alone(device, name, frozen_state):
    check_alone(*KINDS[name], frozen_state)


@pytest.fixture
def _double():
    """What torch counts in numbers, NAdam's product for one, is exact then, also after a load."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
@pytest.mark.parametrize("name", KINDS)
def test_by_the_count_of_the_tensor_frozen_entries_are_put_back_and_all_else_is_torchs(
    device, name, frozen_state
):
    """With a resumed run after every fourth step."""
    kind, settings = KINDS[name]
    start, (masks, gradients) = torch.randn(4, 3, dtype=torch.float64), course()
    weight = torch.nn.Parameter(start.clone())
    make, begins = functools.partial(kind, **settings), settings.get("initial_accumulator_value", 0.0)
    optimizer = gp.MaskedOptimizer(make([weight]), frozen_state, "tensor")
    for first in range(0, len(masks), 4):
        follow(optimizer, weight, masks[first : first + 4], gradients[first : first + 4])
        optimizer = saved_and_loaded(optimizer, make, weight, dense=False)
    reference = PutBack(make, [start], begins, restarts=False)
    for mask, gradient in zip(masks, gradients, strict=True):
        if frozen_state != "keep":
            reference.forget(0, ~mask.expand(4, 3))
        reference.step([gradient], [mask.expand(4, 3)])
    torch.testing.assert_close(weight.detach().view(-1), reference.value(0), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.02)]
)
def test_lower_precision_is_that_of_torchs_fused_step(device, dtype, tolerance, frozen_state):
    settings = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3, "fused": True}
    check_alone(torch.optim.AdamW, settings, frozen_state, dtype, 4 * tolerance, tolerance)


class SignMomentum(torch.optim.Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params, lr, momentum=0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("mean", torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter -= group["lr"] / state["step"].item() * state["mean"].sign()


@pytest.fixture
def own_rule(monkeypatch):
    monkeypatch.setattr("gradpolicy.optim.update_rules._REGISTERED", {})

    @gp.update_rule(SignMomentum)
    class Rule(gp.UpdateRule):
        names = ("mean",)

        def state(self, group):
            return {"mean": 0.0}

        def settings(self, group):
            return (1.0, group["lr"], group["momentum"])

        def numbers(self, ages):
            return (1 / ages,)

        def update(self, parameter, gradient, state, settings, numbers):
            sign, lr, momentum = settings
            mean = state["mean"] + (sign * gradient - state["mean"]) * (1 - momentum)
            return parameter - lr * numbers[0] * mean.sign(), {"mean": mean}

    return Rule


@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
def test_a_rule_of_a_users_own_makes_their_optimizer_exact(own_rule, frozen_state):
    check_alone(SignMomentum, {"lr": 0.1}, frozen_state)
    assert isinstance(rule_for(SignMomentum([torch.zeros(1)], lr=0.1)), own_rule)


def test_a_step_that_is_overridden_has_no_rule():
    class Slower(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Renamed(torch.optim.AdamW):
        pass

    weights = [torch.zeros(1, requires_grad=True)]
    assert rule_for(Slower(weights)) is None
    assert rule_for(Renamed(weights)) is not None
    assert rule_for(Lion(weights, cautious=True)) is None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: gp.update_rule(torch.nn.Linear), "a class of optimizers"),
        (lambda: gp.update_rule(torch.optim.SGD)(lambda: None), "subclass of gradpolicy.UpdateRule"),
    ],
)
def test_what_is_no_rule_is_refused(use, message):
    with pytest.raises(gp.PolicyError, match=message):
        use()
