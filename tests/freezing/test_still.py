"""Freeze(buffers=…): what a policy freezes as a whole stands still."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradpolicy as gp
from gradpolicy.errors import PolicyError


class DropPath(nn.Module):
    """Stochastic depth as timm and torchvision write it."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.3

    def forward(self, x):
        kept = (torch.rand(len(x), 1) >= self.drop_prob) / (1 - self.drop_prob)
        return x * kept if self.training else x


class Block(nn.Module):
    """Everything that moves beside parameters."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.path, self.drop = DropPath(), nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2)

    def forward(self, x):
        x = x + self.path(self.drop(self.norm(self.linear(x))))
        x = F.dropout(x, 0.1, self.training)
        return x + self.attention(x, x, x)[0]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Dropout(0.1), nn.Linear(6, 2))


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def first(buffers):
    return {"first": gp.Freeze(False, params="0.*", buffers=buffers)}


def in_turn(**options):
    return {"turns": gp.Freeze(blocks_in_turn, params=["0.*", "1.*"], **options)}


def blocks_in_turn(name, parameter, step):
    return step // 3 % 2 == int(name[0])


def train(model, policies, steps, *, each=lambda model, optimizer, step: None, state=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with gp.training(model, optimizer, policies, seed=0) as wrapped:
        if state is not None:
            wrapped.load_state_dict(state)
        for step in steps:
            each(model, wrapped, step)
            torch.manual_seed(step)
            model(X + step).square().mean().backward()
            wrapped.step()
            wrapped.zero_grad()
        return copy.deepcopy(wrapped.state_dict())


def watched(part):
    """A list that gets the outputs of a part for the same input, at each call."""
    outputs = []

    def watch(module, args, output):
        outputs.append((module.forward(X).detach(), output.detach()))

    part.register_forward_hook(watch)
    return outputs


def bits_of(part):
    return {name: buffer.clone() for name, buffer in part.named_buffers()}


@pytest.mark.parametrize("buffers", ["move", "eval"])
def test_the_output_of_a_frozen_part_is_the_same_in_each_step_where_it_is_in_evaluation(model, buffers):
    before, outputs = bits_of(model[0]), watched(model[0])
    train(model, first(buffers), range(4), each=lambda model, optimizer, step: model.train())
    same = [torch.equal(one, outputs[0][0]) for one, _ in outputs]
    assert same == [True] + [buffers == "eval"] * 3
    after = bits_of(model[0])
    assert all(torch.equal(before[name], after[name]) for name in before) == (buffers != "move")
    assert all(module.training for module in model.modules())


def test_a_part_that_thaws_moves_on_from_where_it_stood_as_by_hand(model):
    by_hand = copy.deepcopy(model)
    train(model, in_turn(buffers="eval"), range(8), each=lambda model, optimizer, step: model.train())

    def keep_still(model, optimizer, step):
        frozen, other = model[1 - step // 3 % 2], model[step // 3 % 2]
        other.train()
        frozen.eval()

    # Nothing but masks, on a copy that a person keeps still.
    train(by_hand, in_turn(), range(8), each=keep_still)
    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_ends_with_the_same_bits(model, stop):
    other, resumed = copy.deepcopy(model), copy.deepcopy(model)
    train(model, in_turn(buffers="eval"), range(8))
    state = train(other, in_turn(buffers="eval"), range(stop))
    resumed.load_state_dict(other.state_dict())
    train(resumed, in_turn(buffers="eval"), range(stop, 8), state=state)
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_only_what_is_frozen_as_a_whole_stands_still(model):
    """Neither a norm of which the bias trains, nor a dropout between what freezes and what trains."""
    mask = gp.masks.Fixed(["*norm.bias", "3.*"])

    def check(model, optimizer, step):
        if step:
            still = {name for name, module in model.named_modules() if not module.training}
            parts = ("linear", "attention", "attention.out_proj")
            assert still == {f"{block}.{part}" for block in "01" for part in parts}

    train(model, {"most": gp.Freeze(mask, buffers="eval")}, range(2), each=check)


def test_what_a_person_had_in_evaluation_is_so_after_a_thaw(model):
    model[0].norm.eval()
    train(model, first("eval"), range(1))
    assert not model[0].norm.training
    assert model[0].drop.training


def test_compiled_code_follows(model):
    by_parts, whole = copy.deepcopy(model), copy.deepcopy(model)
    train(model, in_turn(buffers="eval"), range(8))
    for compiled in (*by_parts[:2], whole):
        compiled.compile(backend="eager")
    for each in (by_parts, whole):
        train(each, in_turn(buffers="eval"), range(8))
        torch.testing.assert_close(each.state_dict(), model.state_dict())


def test_a_model_of_which_only_parts_are_called_is_refused(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policies = {"first": gp.Freeze(gp.masks.Fixed(["1.*"]), params=["0.*", "1.*"], buffers="eval")}
    with (
        gp.training(model, optimizer, policies),
        pytest.raises(PolicyError, match=r"Freeze\.buffers.* only if the model itself is called before"),
    ):
        model[1](model[0](X)).sum().backward()


def test_an_unknown_value_is_named():
    with pytest.raises(PolicyError, match=r"Freeze\.buffers"):
        gp.Freeze(False, buffers="still")


@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "policy", [gp.Freeze(False, params="0.*"), gp.Train(gp.masks.Rows([0]), params="0.weight")]
)
def test_an_embedding_that_rescales_its_rows_is_refused(embedding, policy):
    model = nn.Sequential(embedding(4, 2, max_norm=1.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    message = rf"0\.weight: {embedding.__name__}\(max_norm=1\.0\) rescales .* expected max_norm=None"
    with pytest.raises(PolicyError, match=message), gp.training(model, optimizer, [policy]):
        model(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (gp.Train(params="0.weight"), False),
        (gp.Freeze(gp.masks.Layerwise(active=1, groups=["1.*", "2.*"])), False),
        (gp.Freeze(gp.masks.Random(0.5)), True),
        (gp.Freeze(gp.masks.Phases([{"params": "*", "until": {"steps": 9}}, {"params": "1.*"}])), True),
        (gp.Freeze(gp.masks.Gradual(groups=["0.*", "[12].*"], unit="step")), True),
    ],
)
def test_it_may_where_the_full_table_trains_at_all_times(policy, refused):
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), model[0].weight.clone()
    refuses = pytest.raises(PolicyError, match=r"0\.weight: .*rescales") if refused else nullcontext()
    with refuses, gp.training(model, optimizer, [policy]) as masked:
        model(torch.arange(4)).sum().backward()
        masked.step()
    assert torch.equal(model[0].weight, before) == refused
