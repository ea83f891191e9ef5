"""Policies on a model: put on, switched, removed, and the model is as it was."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import gradpolicy as gp

EVERY_KIND = {
    "guide": gp.Guided(modules="first"),
    "rounding": gp.StraightThrough("tanh", ops="round", modules=["*", "!first"]),
    "slow": gp.Scale(0.5, modules="second"),
    "bound": gp.Clip(norm=1.0, modules="second", at="output"),
    "turn": gp.Reverse(params="head.bias"),
    "cut": gp.Stop("zero", params="stem.bias"),
}


def test_restores_the_model(net, batch, snapshot, parameter_gradients):
    hook = net.head.register_forward_hook(lambda *_: None)
    net.stem.weight.requires_grad_(False)
    net.second.eval()
    parameter_gradients(net, batch)
    before = snapshot(net)
    with gp.install(net, EVERY_KIND):
        assert snapshot(net) != before
        net(batch).sum()
    assert snapshot(net) == before
    hook.remove()


def test_restores_the_model_after_errors(net, batch, snapshot):
    before = snapshot(net)
    with pytest.raises(KeyError), gp.install(net, EVERY_KIND) as installed:
        raise KeyError
    installed.remove()
    assert snapshot(net) == before
    with pytest.raises(RuntimeError), gp.install(net, EVERY_KIND):
        net(batch[:, :2])
    assert snapshot(net) == before


def test_failed_install_restores_the_model(net, snapshot, monkeypatch):
    before = snapshot(net)
    with pytest.raises(gp.PolicyError):
        gp.install(net, {**EVERY_KIND, "again": gp.Stop(modules="second")})
    assert snapshot(net) == before
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gp.install(net, {"slow": gp.Scale(0.5, modules="first"), "turn": gp.Reverse(params="head.bias")})
    assert snapshot(net) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nested_installations_in_any_order(net, batch, snapshot, parameter_gradients, same, order):
    before, plain = snapshot(net), parameter_gradients(net, batch)
    net.zero_grad(set_to_none=True)
    installations = [
        gp.install(net, [gp.StraightThrough(ops="round", modules="second")]),
        gp.install(net, [gp.Scale(2.0, modules="second"), gp.Scale(2.0, params="head.weight")]),
        gp.install(net, [gp.Scale(3.0, modules="second"), gp.Scale(3.0, params="head.weight")]),
    ]
    found = parameter_gradients(net, batch)
    assert found["second.linear.weight"].any()
    assert not found["first.linear.weight"].any()
    assert not plain["second.linear.weight"].any()
    torch.testing.assert_close(found["head.weight"], 6 * plain["head.weight"])
    for number in order:
        installations[number].remove()
    assert same(parameter_gradients(net, batch), plain)
    net.zero_grad(set_to_none=True)
    assert snapshot(net) == before


def saved(model):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_copies_use_their_own_weights(copied, net, batch, parameter_gradients, same):
    with gp.install(net, EVERY_KIND):
        other = copied(net)
        assert same(parameter_gradients(other, batch), parameter_gradients(net, batch))
        with torch.no_grad():
            other.head.weight.zero_()
            other.head.bias.fill_(7.0)
        assert torch.equal(other(batch), torch.full((8, 2), 7.0))
        assert not torch.equal(net(batch), other(batch))


@pytest.mark.parametrize(
    ("modules", "matched"),
    [
        (None, 4),
        ("0", 2),
        ("0.1", 1),
        (["0", "!0.1"], 1),
        (["*", "!0"], 2),
        (nn.ReLU, 3),
        (nn.Sequential, 4),
        (["*", "!1"], 2),
    ],
)
def test_policy_holds_in_matched_modules_and_below(modules, matched, batch, as_module):
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    own = as_module(lambda x: torch.relu(own.part(x)))
    own.part = nn.ReLU()
    policies = {"guide": gp.Guided(modules=modules), "flat": gp.UseRule("identity", ops="sigmoid")}
    model = nn.Sequential(inner, own, nn.Sigmoid())
    with gp.install(model, policies) as installed:
        model(batch.requires_grad_())
        counts = {row.name: row.matched for row in installed.report().rows}
    assert counts == {"guide": {"relu": matched}, "flat": {"sigmoid": 1}}


def test_a_block_inside_a_module_wins_over_its_policy(gradient, as_module):
    minus = gp.gradient_override({"round": "reverse", "relu": "reverse"})
    model = as_module(minus(lambda x: model.relu(torch.round(x))))
    model.relu = nn.ReLU()
    with gp.install(model, [gp.StraightThrough(), gp.Guided()]):
        found, _ = gradient(model, torch.ones(3), torch.full((3,), -1.0))
    assert torch.equal(found, torch.full((3,), -1.0))


def test_report(as_module):
    model = as_module(lambda x: model.scripted(model.cell(torch.tanh(x))[0]))
    model.cell, model.scripted = nn.LSTM(3, 3), torch.jit.script(nn.Tanh())
    with pytest.warns(UserWarning, match="cannot see into ScriptModule"):
        installed = gp.install(model, {"flat": gp.UseRule("identity", ops=["tanh", "sin"])})
    with pytest.warns(UserWarning, match="cannot see into lstm"):
        model(torch.randn(2, 1, 3, requires_grad=True))
    row = installed.report().rows[0]
    assert (row.name, row.kind, row.active, row.operations) == ("flat", "UseRule", True, ("tanh", "sin"))
    assert row.matched == {"tanh": 1}
    assert set(row.opaque_calls) == {"lstm", "ScriptModule 'scripted'"}
    text = str(installed.report())
    assert "tanh × 1, sin × 0" in text
    assert "lstm" in text
    with pytest.warns(UserWarning, match="'sin' was never met"):
        installed.remove()


def test_update_sets_the_time(net):
    policies = {
        "late": gp.Guided(when=gp.When(start=5)),
        "testing": gp.Scale(2.0, modules="first", when=gp.When(phases="test")),
    }
    with gp.install(net, policies) as installed:
        for time, expected in (
            (None, [True, True]),
            ({"phase": "fit", "step": 4}, [False, False]),
            ({"phase": "fit", "step": 5}, [True, False]),
            ({"phase": "test"}, [False, True]),
        ):
            if time is not None:
                installed.update(**time)
            assert [row.active for row in installed.report().rows] == expected
        installed.set_active("late", True)
        assert installed.report().rows[0].active
        with pytest.raises(gp.PolicyError, match="late"):
            installed.set_active("lat", True)


def test_a_policy_that_is_off_leaves_the_gradient_plain_from_the_next_forward_pass_on(
    net, batch, parameter_gradients, same
):
    plain = parameter_gradients(net, batch)
    policies = {name: policy for name, policy in EVERY_KIND.items() if not policy.params}

    def switched_off_after(*inputs):
        result = net(*inputs)
        for name in policies:
            installed.set_active(name, False)
        return result

    with gp.install(net, policies) as installed:
        ruled = parameter_gradients(net, batch)
        assert same(parameter_gradients(net, batch, call=switched_off_after), ruled)
        assert same(parameter_gradients(net, batch), plain)
    with gp.install(net, EVERY_KIND) as installed:
        for name in EVERY_KIND:
            installed.set_active(name, False)
        assert same(parameter_gradients(net, batch), plain)


@pytest.mark.parametrize(
    ("layer", "policy", "before", "after"),
    [
        (nn.Identity(), gp.Scale(0.5, modules="1"), 41.0, 10.25),
        (nn.ReLU(), gp.Guided(), 41.0, 32.0),
        (nn.ReLU(inplace=True), gp.Guided(), 41.0, 32.0),
    ],
)
def test_gradient_norms_before_and_after(layer, policy, before, after):
    model, x = nn.Sequential(nn.Identity(), layer), torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    with gp.install(model, {"it": policy}) as installed:
        for measures in (False, True, True):
            # Measuring anew forgets what was measured.
            installed.measure_norms(measures)
            (model(x * 1) * torch.tensor([-3.0, 4.0, 4.0])).sum().backward()
            assert list(installed.gradient_norms) == ["it"] * measures
        norms = installed.gradient_norms["it"]
    assert (float(norms.before), float(norms.after)) == pytest.approx((before, after))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": gp.Guided(), "b": gp.Deconv(modules="first")}, "'a' and 'b'.*'relu'.*'first'"),
        ({"a": gp.Stop(modules="first"), "b": gp.Scale(3.0, modules="first")}, "'a' and 'b'.*'a' stops"),
        (
            {"a": gp.Stop("zero", params="head.*"), "b": gp.Scale(3.0, params="*bias")},
            "'a' and 'b'.*'head.bias'",
        ),
        (
            {
                "a": gp.Guided(when=gp.When(phases=("fit", "test"), stop=5)),
                "b": gp.Deconv(when=gp.When(phases=("fit", "test"), start=5)),
            },
            "'a' and 'b'.*'relu'.*the model",
        ),
        (gp.Guided(), "list or dict of policies"),
        ({"a": gp.Freeze(gp.masks.Fixed(False))}, "gradpolicy.training"),
        ({"a": gp.Scale(2.0, modules="fist")}, "'fist' matches nothing; did you mean 'first'"),
        ({"a": gp.Scale(2.0, params="heed.*")}, "head"),
        ({"a": gp.UseRule("identity", ops="roud")}, "round"),
        ({"a": "guided"}, "flow policy"),
    ],
)
def test_contradictory_policies_are_refused(net, policies, message):
    with pytest.raises(gp.PolicyError, match=message):
        gp.install(net, policies)


def test_policies_at_different_times(net, batch):
    policies = {
        "early": gp.Guided(when=gp.When(stop=10)),
        "late": gp.Deconv(when=gp.When(start=10)),
        "testing": gp.Guided(when=gp.When(phases="test")),
    }
    with gp.install(net, policies) as installed:
        installed.update(step=10)
        net(batch)
        assert installed.operation_counts == {"early": 0, "late": 2, "testing": 0}


def test_entry_points(batch):
    class Step(nn.Linear):
        def training_step(self, batch, batch_idx):
            return torch.round(nn.functional.linear(batch, self.weight)).sum()

    with gp.install(model := Step(4, 4), [gp.StraightThrough()], entry_points={"": ("training_step",)}):
        assert "forward" not in model.__dict__
        assert model.training_step.__wrapped__.__code__ is Step.training_step.__code__
        model.training_step(batch, 0).backward()
    assert model.weight.grad.any()
    assert "training_step" not in model.__dict__


def test_installing_and_removing_does_not_leak(net, batch):
    def objects_after(round_trips):
        for _ in range(round_trips):
            with gp.install(net, EVERY_KIND):
                net(batch).sum().backward()
            net.zero_grad(set_to_none=True)
        gc.collect()
        return len(gc.get_objects())

    objects = objects_after(3)
    assert objects_after(10) - objects < 10


def test_data_parallel():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    parallel = nn.DataParallel(model)
    parallel.device_ids = []
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)
    with gp.install(parallel, [gp.Scale(0.0, modules="module.0")]):
        parallel(x).sum().backward()
    assert not x.grad.any()
    parallel.device_ids = [0, 1]
    with pytest.raises(gp.PolicyError, match="DataParallel on 2 devices; use DistributedDataParallel"):
        gp.install(parallel, [gp.Guided()])
    assert "forward" not in model[1].__dict__


def test_many_overlapping_installations_leave_the_model_plain(net, batch, snapshot):
    before, installed = snapshot(net), None
    for _ in range(1100):
        following = gp.install(net, [gp.Scale(0.5, modules="stem")])
        if installed is not None:
            installed.remove(quiet=True)
        installed = following
    net(batch)
    installed.remove(quiet=True)
    assert snapshot(net) == before


def test_a_wrapper_between_installations_gives_a_warning(net):
    first = gp.install(net, [gp.Scale(0.5, modules="stem")])
    inner = net.stem.forward
    net.stem.forward = lambda *inputs: inner(*inputs)
    second = gp.install(net, [gp.Scale(0.5, modules="stem")])
    with pytest.warns(UserWarning, match=r"forward was replaced while policies were installed"):
        first.remove(quiet=True)
    second.remove(quiet=True)


def test_saving_a_result_gives_no_warning(recwarn):
    model = nn.ReLU()
    with gp.install(model, [gp.Scale(0.5, ops=["relu"])]):
        torch.save(model(torch.ones(2, requires_grad=True)), io.BytesIO())
    assert not recwarn.list
