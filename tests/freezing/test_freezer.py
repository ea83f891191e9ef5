"""Freezer: who gets gradients, which masks are in force and saved, and what is an error."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.freezing import Freezer
from gradpolicy.masks import MaskSource
from tests.fixtures import through_a_file
from tests.freezing.conftest import FakeOptimizer, freezer_of, loss_of, masked, train


class Recorder(MaskSource):
    """Freezes everything at odd periods; writes down the gradients it is shown."""

    def __init__(self, **timetable) -> None:
        super().__init__(**timetable)
        self.seen = []

    def masks(self, step: int, epoch: int) -> Mapping[str, bool]:
        return dict.fromkeys(self.parameters, self.period(step, epoch) % 2 == 0)

    def observe(self, gradients) -> None:
        self.seen.append({name: gradient.clone() for name, gradient in gradients.items()})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_gradients_of_frozen_entries_are_left_for_who_asks_to_have_them_removed(stack, tokens) -> None:
    rows, source = torch.tensor([[True], [False], [True]]), Recorder(every=2)
    policies = {
        "watched": gp.Freeze(source, params="head.weight"),
        "rows": gp.Freeze({"head.weight": rows}, params="head.weight"),
        "bias": gp.Freeze(gp.masks.Fixed(), params="head.bias"),
    }
    optimizer, freezer = freezer_of(stack, policies, toggle_requires_grad=False)
    freezer.begin_step(0)
    loss_of(stack, tokens).backward()
    whole = stack.head.weight.grad.clone()
    freezer.observe(optimizer)
    assert torch.equal(stack.head.weight.grad, whole)
    assert torch.equal(source.seen[0]["head.weight"], whole)
    assert stack.head.bias.grad is not None
    optimizer.mask_gradients()
    assert torch.equal(stack.head.weight.grad, torch.where(rows, whole, 0))
    assert stack.head.bias.grad is None


class WantsLater(Recorder):
    """Freezes everything at all times; from step 2 on it wants to see gradients."""

    def masks(self, step: int, epoch: int) -> Mapping[str, bool]:
        return dict.fromkeys(self.parameters, False)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        return set(self.parameters) if step >= 2 else set()


def test_requires_grad_comes_on_when_a_gradient_is_wanted_though_no_mask_changes(stack) -> None:
    _, freezer = freezer_of(stack, {"head": gp.Freeze(WantsLater(), params="head.*")})
    on = []
    for step in range(4):
        freezer.begin_step(step)
        on.append(stack.head.weight.requires_grad)
    assert on == [False, False, True, True]
    assert freezer.wanted_gradients() == {"head.weight", "head.bias"}


def test_a_flag_for_the_tensor_spares_the_backward_pass_in_whatever_form_it_comes(stack) -> None:
    """A drawn flag is the same as the seeded mask's; a tensor of one entry stands for the whole."""
    drawn = gp.masks.Random(0.5, level="tensor")
    _, freezer = freezer_of(stack, {"drawn": gp.Freeze(drawn, params=["blocks.*", "head.*"])})
    frozen = set()
    for step in range(4):
        freezer.begin_step(step)
        for name, seeded in drawn.masks(step, 0).items():
            mask = freezer.mask_of(name)
            assert mask is bool(seeded.materialize(()))
            assert stack.get_parameter(name).requires_grad is mask
            frozen |= set() if mask else {name}
    assert len(frozen) > 5
    freezer.restore()
    flag = {"head.weight": torch.zeros(1, 1, dtype=torch.bool)}
    freezer_of(stack, {"flag": gp.Freeze(flag, params="head.weight")})[1].begin_step(0)
    assert not stack.head.weight.requires_grad


def test_outside_its_time_a_policy_lets_everything_train(stack) -> None:
    """What another policy freezes of it stays frozen."""
    rows = torch.tensor([[True], [False], [True]])
    policies = {
        "all": gp.Freeze(gp.masks.Fixed(), params="head.*", when=gp.When(start=2, stop=4)),
        "rows": gp.Freeze({"head.weight": rows}, params="head.weight"),
    }
    optimizer, freezer = freezer_of(stack, policies)
    shares = []
    for step in range(6):
        freezer.begin_step(step)
        shares.append([optimizer.active_share(each) for each in stack.head.parameters()])
    before, within = [pytest.approx(2 / 3), 1.0], [0.0, 0.0]
    assert shares == [before, before, within, within, before, before]
    assert all(each.requires_grad for each in stack.parameters())


class ByTheTime(MaskSource):
    """Everything trains; learning rates are scaled by the step and the epoch."""

    def masks(self, step: int, epoch: int) -> dict:
        return {}

    def settings(self, step: int, epoch: int) -> dict[str, dict[str, float]]:
        return {name: {"lr": (1.0 + step) / (1 + epoch)} for name in self.parameters}


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Rprop])
def test_an_optimizer_that_has_no_rate_of_a_layer_is_refused(stack, optimizer) -> None:
    holding = gp.MaskedOptimizer(optimizer(stack.parameters()))
    freezer = Freezer(stack, [holding], {"rate": gp.Freeze(ByTheTime())})
    with pytest.raises(PolicyError, match=f"{optimizer.__name__} cannot give parameters rates of their own"):
        freezer.begin_step(0)


def test_what_is_frozen_keeps_its_bits_also_where_rates_are_scaled(stack) -> None:
    active = torch.arange(3).view(3, 1).expand(3, 4) == 2
    policies = {
        "rate": gp.Freeze(ByTheTime()),
        "part": gp.Freeze({"head.weight": active}, params="head.weight"),
    }
    with torch.no_grad():
        stack.head.weight[0], stack.head.weight[1, 0] = -0.0, float("inf")
    first = stack.head.weight.detach().clone()
    optimizer, freezer = freezer_of(stack, policies)
    freezer.begin_step(0, epoch=2)  # a third of the rate, where a product would turn −0 into 0
    stack.head.weight.grad = torch.ones(3, 4)
    freezer.observe(freezer.optimizers[0])
    optimizer.step()
    after = stack.head.weight.detach()
    assert torch.equal(after[:2].view(torch.int32), first[:2].view(torch.int32))
    assert (after[2] != first[2]).all()


def test_a_source_is_asked_once_in_each_of_its_periods(stack) -> None:
    class Asked(ByTheTime):
        def masks(self, step: int, epoch: int) -> dict:
            asked.append(step)
            return {}

    asked: list[int] = []
    _, freezer = freezer_of(stack, {"own": gp.Freeze(Asked(every=3))})
    for step in range(7):
        freezer.begin_step(step)
    assert asked == [0, 3, 6]


def by_magnitude(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    return parameter.detach().abs() > parameter.detach().abs().median()


@pytest.mark.parametrize("cut", [2, 3, 4, 6, 7])
@pytest.mark.parametrize("when", [None, gp.When(start=3, stop=7)])
def test_masks_that_no_source_could_give_again_are_saved(stack, tokens, cut: int, when) -> None:
    """A function may go by the weights of the step at which it was asked."""
    mask = gp.masks.Function(by_magnitude, every=3)
    runs = []
    for stops in ((8,), (cut, 8)):
        model, first, saved = copy.deepcopy(stack), 0, ()
        for stop in stops:
            optimizer, freezer = freezer_of(model, {"large": gp.Freeze(copy.deepcopy(mask), when=when)})
            if first:
                optimizer.load_state_dict(saved[0])
                freezer.load_state_dict(saved[1])
            train(model, freezer, tokens, range(first, stop))
            saved, first = through_a_file((optimizer.state_dict(), freezer.state_dict())), stop
        runs.append(weights(model))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_damaged_mask_is_refused_under_the_name_of_its_policy(stack) -> None:
    random = gp.masks.Function(lambda name, parameter, step: gp.masks.RandomMask(0, step, name, 0.5))
    _, freezer = freezer_of(stack, {"own": gp.Freeze(random)})
    freezer.begin_step(0)
    saved = freezer.state_dict()
    saved["masks"]["own"]["masks"]["head.weight"] = {"seed": 0}
    with pytest.raises(PolicyError, match=r"policy\.own: its saved state is .*damaged"):
        freezer.load_state_dict(saved)


CHANGED = [
    (gp.masks.TopK(0.5), "*", gp.masks.PruneAndGrow(0.5), "*"),
    (gp.masks.PruneAndGrow(0.5), "*", gp.masks.Gradual(), "*"),
    (gp.masks.Random(0.5), "*", gp.masks.TopK(0.5), "*"),
    (gp.masks.TopK(0.5), "*", gp.masks.TopK(0.5), "blocks.*"),
    (gp.masks.PruneAndGrow(0.5), "blocks.*", gp.masks.PruneAndGrow(0.5), "*"),
]


@pytest.mark.parametrize(("before", "first", "after", "then"), CHANGED)
def test_a_policy_that_has_become_another_starts_anew(stack, tokens, before, first, after, then) -> None:
    optimizer, freezer = freezer_of(stack, {"it": gp.Freeze(copy.deepcopy(before), params=first)})
    train(stack, freezer, tokens, range(2))
    policies = [{"it": gp.Freeze(copy.deepcopy(after), params=then)} for _ in range(2)]
    fresh, resumed = (Freezer(stack, [optimizer], each) for each in policies)
    with pytest.warns(UserWarning, match=r"policy.it: .* it is re-initialised"):
        resumed.load_state_dict(freezer.state_dict())
    for each in (fresh, resumed):
        each.begin_step(2)
    for name in fresh.parameters:
        one, other = fresh.mask_of(name), resumed.mask_of(name)
        assert one is other or torch.equal(one, other)


SOURCES = [
    gp.masks.Gradual(every=2, unit="step"),
    gp.masks.BlockCyclic(every=1),
    gp.masks.Layerwise(2, every=1),
]
OF_STACK = ("embed", *(f"blocks.{index}" for index in range(4)), "head")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("idle", ["blocks.1", "head"])
def test_parameters_without_a_gradient_are_in_no_layer_and_always_train(stack, source, idle: str) -> None:
    names = [name for name, _ in stack.named_parameters() if name.startswith(f"{idle}.")]
    policies = {"own": gp.Freeze(copy.deepcopy(source)), "rates": gp.Rates({"*": gp.LayerDecay(0.5)})}
    optimizer = masked(stack)
    freezer = Freezer(
        stack, [optimizer], {"own": policies["own"]}, rates={"rates": policies["rates"]}, idle=names
    )
    counted = {name: [layer.name for layer in layers] for name, layers in freezer.counted_layers().items()}
    others = [name for name in OF_STACK if name != idle]
    assert counted["rates"] == others
    assert counted["own"] == [
        name for name in others if not isinstance(source, gp.masks.Layerwise) or "." in name
    ]
    for step in range(6):
        freezer.begin_step(step)
        assert all(freezer.mask_of(name) is True for name in names)
        assert not set(names) & freezer.frozen_tensors()["own"]


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_has_the_layers_of_the_saved_one(stack, first: bool) -> None:
    idle = [name for name, _ in stack.named_parameters() if name.startswith("head.")]

    def made(names: list[str]) -> tuple[gp.MaskedOptimizer, Freezer]:
        policies = {"own": gp.Freeze(gp.masks.Gradual(every=1, unit="step"))}
        rates = {"rates": gp.Rates({"*": gp.LayerDecay(0.5)})}
        optimizer = masked(stack)
        return optimizer, Freezer(stack, [optimizer], policies, rates=rates, idle=names)

    (_, saved), (_, resumed) = made(idle if first else []), made([] if first else idle)
    resumed.begin_step(0)
    resumed.load_state_dict(through_a_file(saved.state_dict()))
    for each in (saved, resumed):
        each.begin_step(1)
    assert resumed.counted_layers() == saved.counted_layers()
    assert resumed.frozen() == saved.frozen()
    assert resumed.what_trains(resumed.parameters) == saved.what_trains(saved.parameters)
    assert resumed.state_dict()["idle"] == sorted(idle if first else [])


def test_parameters_that_join_an_optimizer_are_refused(stack) -> None:
    first, *rest = stack.parameters()
    optimizer = FakeOptimizer(rest)
    freezer = Freezer(stack, [optimizer], {"top": gp.Freeze(gp.masks.TopK(0.5))}, seed=0)
    freezer.begin_step(0)
    optimizer.param_groups.append({"params": [first]})
    with pytest.raises(PolicyError, match=r"policy\.top: .* joined the optimizer during training"):
        freezer.begin_step(1)


@pytest.mark.parametrize("sparse_first", [False, True])
def test_what_one_policy_writes_stays_zero_where_another_holds_it_at_zero(
    stack, tokens, sparse_first
) -> None:
    writing = gp.masks.PruneAndGrow(0.5, grow="random", every=2)
    policies = {
        "writing": gp.Freeze(writing, params="blocks.*.weight"),
        "sparse": gp.Freeze(gp.masks.PruneAndGrow(0.25, every=None, seed=1), params="blocks.*.weight"),
    }
    _, freezer = freezer_of(stack, dict(sorted(policies.items(), reverse=not sparse_first)))
    for step in range(5):
        train(stack, freezer, tokens, range(step, step + 1))
        for block in stack.blocks:
            assert int(block.weight.count_nonzero()) <= 4


def test_wrong_input_is_one_clear_message(stack) -> None:
    misspelt = type("Misspelt", (MaskSource,), {"masks": lambda self, *_: {"head.wieght": True}})()
    head, embed = (gp.Freeze(gp.masks.Fixed(), params=params) for params in ("head.*", "embed.*"))
    by_tensor = gp.Freeze(gp.masks.Random(), bias_correction="tensor")
    for message, policies in (
        (
            r"'head.weight': policy\.a wants bias_correction='tensor', policy\.b bias_correction='entry'",
            {"a": by_tensor, "b": head},
        ),
        (r"policy\.a\.params: .*did you mean 'head", {"a": gp.Freeze(params="haed.*")}),
        (r"policy\.a: a mask for 'head.wieght'.*did you mean 'head.weight'", {"a": gp.Freeze(misspelt)}),
        (r"policy\.a: mask of 'embed.weight': expected True, False", {"a": gp.Freeze(lambda *_: 1)}),
    ):
        with pytest.raises(PolicyError, match=message):
            freezer_of(stack, policies)[1].begin_step(0)
    only_head = gp.MaskedOptimizer(torch.optim.SGD(stack.head.parameters(), lr=1.0))
    with pytest.raises(PolicyError, match=r"policy\.a: no optimizer holds what it matches: embed.weight"):
        Freezer(stack, [only_head], {"a": embed})


# ---- a source that goes on writing to the tensors that it gave


class Rewriting(gp.masks.MaskSource):
    """Trains one row after the other, by a tensor that it goes on writing to."""

    def prepare(self) -> None:
        self.mask = torch.zeros(4, 1, dtype=torch.bool)

    def masks(self, step: int, epoch: int) -> Mapping[str, torch.Tensor]:
        self.mask[:] = False
        self.mask[self.period(step, epoch) % 4] = True
        return {"blocks.0.weight": self.mask}


class Repeating(Rewriting):
    repeats_masks = True


def on_rows(stack, source) -> tuple[gp.MaskedOptimizer, Freezer]:
    return freezer_of(stack, {"rows": gp.Freeze(source, params="blocks.0.weight")})


@pytest.mark.parametrize("kind", [Rewriting, Repeating])
def test_a_mask_written_anew_in_place_is_a_new_mask(stack, kind: type[Rewriting]) -> None:
    optimizer, freezer = on_rows(stack, kind())
    for step in range(6):
        freezer.begin_step(step)
        row = torch.arange(4)[:, None] == step % 4
        assert torch.equal(freezer.mask_of("blocks.0.weight"), row)
        assert torch.equal(optimizer.get_mask(stack.blocks[0].weight).expand(4, 4), row.expand(4, 4))


def test_what_is_written_between_changes_is_not_yet_in_force_nor_saved(stack) -> None:
    source = Rewriting(every=3)
    _, freezer = on_rows(stack, source)
    freezer.begin_step(0)
    source.mask[:] = True
    freezer.begin_step(1)
    row = torch.arange(4)[:, None] == 0
    assert torch.equal(freezer.mask_of("blocks.0.weight"), row)
    assert torch.equal(freezer.state_dict()["masks"]["rows"]["masks"]["blocks.0.weight"], row)
