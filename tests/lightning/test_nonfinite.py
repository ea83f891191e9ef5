import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from process_pool import ProcessPool, refusal
from runs import fit
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.lightning.nonfinite import Finding, StopOnNonFinite, first_nonfinite
from tests.fixtures import TwoLayers


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


TRAINED = {name: gp.Freeze(gp.masks.Fixed(), params=f"{name}.*") for name in "01"}


def found_in(model: nn.Module, *policies: Any, **settings: bool) -> Finding:
    """What is not finite in a pass over three samples of ones."""
    return first_nonfinite(model, lambda m: m(torch.ones(3, 2)).sum(), *policies, **settings)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (-1.0, "first in the output of module '0' (Root)"),
        (torch.nan, "the input of module '0' (Root) is not finite already"),
    ],
)
def test_an_input_that_is_not_finite_is_told_from_an_output(value: float, what: str) -> None:
    found = first_nonfinite(nn.Sequential(Root()), lambda m: m(torch.full((2,), value)).sum())
    assert (found.module, found.what) == ("0", what)


def test_weights_that_an_update_spoilt_are_named_with_the_policy_that_trains_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data[0, 0] = torch.nan
    found = found_in(model, TRAINED)
    assert (found.module, found.policies) == ("1", ("1",))
    assert "weight an earlier update made non-finite" in found.what


class RootOfWeight(nn.Module):
    """Gives its input a finite gradient, and its weight an infinite one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sqrt()


def test_a_gradient_of_a_weight_alone_is_named_with_the_policy_that_trains_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), RootOfWeight())
    found = found_in(model, TRAINED, backward=True)
    assert (found.module, found.policies) == ("1", ("1",))
    assert found.what == "first in the gradient of '1.weight'"


@gp.rule("spoils_everything")
def spoils_everything(grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return grad / 0.0


SPOILER = {"spoiler": gp.UseRule("spoils_everything", modules="trunk.1", ops="relu")}


def test_training_stops_with_the_module_and_the_policy(train) -> None:
    with pytest.raises(gp.PolicyError, match=r"update 1: a gradient is not finite.*'trunk.1'.*spoiler"):
        train(SPOILER, StopOnNonFinite())


def spoil_on_rank_1(module: LightningModule) -> None:
    """The root's derivative at 0 is infinite, and infinity times 0 is no number."""
    if dist.get_rank() == 1:
        layer = module.get_submodule("layers.1")
        layer.register_forward_hook(lambda _, args, output: output + 0 * (0 * output).sqrt())


def spoilt() -> str:
    settings = {"callbacks": [StopOnNonFinite()]}
    return refusal(fit, "ddp", "entries", settings=settings, prepare=spoil_on_rank_1)


def test_ranks_that_share_a_gradient_name_the_module_of_the_rank_that_spoilt_it(pair: ProcessPool) -> None:
    for rank, message in enumerate(pair(spoilt)):
        assert message.startswith(f"rank {rank}, epoch 0, update 1: a gradient is not finite; ")
        assert "'layers.1." in message


def test_a_loss_that_is_not_finite_stops_training_too(two_layers, train) -> None:
    two_layers.head.weight.data[0, 0] = torch.inf
    message = r"^epoch 0, update 1: the loss is .*'head'.*no policy acts there"
    with pytest.raises(gp.PolicyError, match=message):
        train({}, StopOnNonFinite())


@pytest.mark.parametrize(
    "policies",
    [{}, {**SPOILER, "frozen": gp.Freeze(gp.masks.Fixed(mask=False), params="trunk.*")}],
    ids=["sound", "not finite where nothing trains"],
)
def test_a_run_of_which_all_that_trains_is_finite_is_left_alone(train, policies) -> None:
    assert train(policies, StopOnNonFinite()).global_step == 4


def test_gradients_are_looked_at_only_where_that_is_asked_for(train) -> None:
    assert train(SPOILER, StopOnNonFinite(gradients=False), max_steps=1).global_step == 1


def test_gradients_under_a_loss_scaler_are_left_to_it(two_layers: LightningModule) -> None:
    two_layers.head.weight.grad = torch.full_like(two_layers.head.weight, torch.inf)
    scaled = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()))
    StopOnNonFinite().on_before_optimizer_step(scaled, two_layers, two_layers.configure_optimizers())
    assert two_layers.head.weight.grad.isinf().all(), "the scaler finds it, and skips the update"


def test_the_first_of_several_backwards_that_are_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Root(), nn.Tanh(), Root(), nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert found_in(model, backward=True).module == "3"


class Gathered(nn.Module):
    """Gives what it is given, in a form of its own."""

    def __init__(self, form: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> object:
        return self.form(x)


@pytest.mark.parametrize(
    ("form", "is_finite"),
    [
        (lambda x: {"kept": x, "root": x.sqrt()}, False),
        (lambda x: [x, (x, x.sqrt())], False),
        (lambda x: torch.complex(x, x.sqrt()), False),
        (lambda x: (x.int(), x > 0, "words", None), True),
    ],
)
def test_outputs_of_any_form_are_looked_at(form: Callable[[Tensor], object], is_finite: bool) -> None:
    model = nn.Sequential(Gathered(form))
    found = first_nonfinite(model, lambda m: m(-torch.ones(2)))
    assert found.module == ("" if is_finite else "0")


def test_weights_that_a_module_takes_from_within_another_are_named() -> None:
    """Attention never calls the layer that holds the weights of its output."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(2, 1)})
    model["attention"].out_proj.weight.data[0, 0] = torch.nan
    found = first_nonfinite(model, lambda m: m["attention"](*[torch.ones(3, 1, 2)] * 3)[0].sum())
    assert found.module == "attention"
    assert "whose out_proj.weight an earlier update made non-finite" in found.what


def test_where_everything_is_finite_it_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    value, gradient = (found_in(model, backward=backward) for backward in (False, True))
    assert str(value) == (
        "in a second pass over the batch every module's output is finite (no policy acts there)"
    )
    assert (value.module, gradient.module) == ("", "")
    assert gradient.what == "in a second pass over the batch every gradient is finite"
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_that_rest_or_go_unused_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Linear(2, 2), RootOfWeight())
    model[0].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    assert found_in(model, backward=True).module == "1"


def test_policies_act_where_their_patterns_say() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Root()), nn.Linear(2, 2))
    nn.init.constant_(model[0][0].weight, -1.0)
    policies = {
        "of a class": gp.Guided(modules=Root),
        "of another class": gp.Guided(modules=nn.Linear),
        "of a pattern": gp.Guided(modules="0.*"),
        "of what contains it": gp.Guided(modules="0"),
        "of all but what lies there": gp.Guided(modules="!0*"),
        "of all but another": gp.Guided(modules="!1"),
        "of all but its parameters": gp.Scale(0.5, params="!0.*"),
        "of all parameters, of which it has none": gp.Freeze(gp.masks.Fixed()),
        "of everything": gp.Guided(),
    }
    found = found_in(model, policies)
    assert found.module == "0.1"
    acting = ("of a class", "of a pattern", "of what contains it", "of all but another", "of everything")
    assert found.policies == acting


def test_a_step_is_run_again_without_logging_and_with_its_own_batch(train) -> None:
    given: list[tuple[Tensor, int]] = []

    class AsMapping(TwoLayers):
        """Gives its loss by name."""

        def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
            given.append((batch[0], batch_idx))
            return {"loss": super().training_step(batch, batch_idx)}

    module, when = AsMapping(), gp.When(start=2)
    spoiler = gp.UseRule("spoils_everything", modules="trunk.1", ops="relu", when=when)
    with pytest.raises(gp.PolicyError, match=r"^epoch 0, update 3: a gradient is not finite; first in"):
        train({"spoiler": spoiler}, StopOnNonFinite(), module=module)
    *_, before, again = given
    assert [number for _, number in given] == [0, 1, 2, 2]
    assert torch.equal(before[0], again[0])
    assert "log" not in vars(module)


def test_a_step_that_takes_no_index_is_run_again_too(train) -> None:
    class Module(TwoLayers):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            return super().training_step(batch, 0)

    module = Module()
    module.head.weight.data[0, 0] = torch.inf
    with pytest.raises(gp.PolicyError, match=r"^epoch 0, update 1: the loss is .*'head'"):
        train(StopOnNonFinite(), module=module)


def test_under_manual_optimization_training_stops_without_another_step(train) -> None:
    class Module(TwoLayers):
        automatic_optimization = False
        steps = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.steps += 1
            self.manual_backward(super().training_step(batch, batch_idx))

    module = Module()
    module.head.weight.data[0, 0] = torch.inf
    with pytest.raises(gp.PolicyError, match=r"the loss is nan; training_step optimizes by hand"):
        train(StopOnNonFinite(), module=module)
    assert module.steps == 1


def test_a_batch_is_let_go_when_its_step_is_over(train) -> None:
    batches: list[weakref.ref[Tensor]] = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, *_) -> None:
            batches.append(weakref.ref(batch[0]))

    train(StopOnNonFinite(), Notes())
    gc.collect()
    assert [batch() for batch in batches] == [None] * 4
