import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp


class Sums(nn.Module):
    """Three additions in different spellings, so that each factor of the gradient tells its call."""

    def forward(self, x):
        return torch.cat([x + 1, torch.add(x, 2), x.add(3)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Sums(), Sums()

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x), x + 4])


def factors(call, count):
    """The gradient that each of the results passes to the one input."""
    found = []
    for index in range(count):
        x = torch.ones(1, requires_grad=True)
        call(x)[index].backward()
        found.append(x.grad.item())
    return found


@pytest.mark.parametrize(("calls", "expected"), [(1, [1, 5, 1]), ([0, 2], [5, 1, 5])])
def test_one_call_of_an_operation_by_its_number_in_every_forward(calls, expected):
    with gp.install(model := Sums(), [gp.Scale(5.0, ops=["add"], calls=calls)]) as installed:
        assert factors(model, 3) == expected
        assert installed.report().rows[0].matched["add"] == 3 * expected.count(5)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, [1, 1, 1, 1, 1, 1, 5]),
        (["first", "second"], [5, 1, 1, 5, 1, 1, 1]),
        ("second", [1, 1, 1, 5, 1, 1, 1]),
    ],
)
def test_each_matched_module_counts_its_own(modules, expected):
    policy = gp.Scale(5.0, ops=["add"], modules=modules, calls=6 if modules is None else 0)
    with gp.install(model := Model(), [policy]):
        assert factors(model, 7) == expected


def test_a_call_counts_for_the_innermost_module_that_is_named():
    with gp.install(model := Model(), [gp.Scale(5.0, ops=["add"], modules=["*"], calls=[0])]):
        assert factors(model, 7) == [5, 1, 1, 5, 1, 1, 5]


def test_two_policies_on_different_calls_of_one_operation():
    policies = [gp.Scale(5.0, ops=["add"], calls=[0]), gp.UseRule("stop", ops=["add"], calls=[2])]
    with gp.install(model := Sums(), policies):
        assert factors(model, 3) == [5, 1, 0]
    with pytest.raises(gp.PolicyError, match="both have a rule for operation 'add'"):
        gp.install(model, [policies[0], gp.Reverse(ops=["add"], calls=[0, 1])])


@pytest.mark.parametrize("modules", [None, ["first"]])
def test_a_forward_with_fewer_calls_is_an_error(modules):
    policy = gp.Scale(5.0, ops=["sub"], modules=modules, calls=[1])
    message = r"'half': operation 'sub' ran 0 times in the forward of .*, so there is no call 1"
    with pytest.raises(gp.PolicyError, match=message), gp.install(model := Model(), {"half": policy}):
        model(torch.ones(1))


def test_a_known_layer_that_never_calls_it_is_an_error_too():
    with (
        pytest.raises(gp.PolicyError, match="'add' ran 0 times in the forward of module '0'"),
        gp.install(model := nn.Sequential(nn.Linear(2, 2)), [gp.Scale(5.0, ops="add", modules="0", calls=0)]),
    ):
        model(torch.ones(1, 2))


def test_relus_are_counted_as_modules_too():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with gp.install(model, [gp.UseRule("stop", ops="relu", calls=1)]):
        x = torch.ones(1, requires_grad=True)
        model(x).backward()
    assert x.grad == 0
    with gp.install(model, [gp.Guided(calls=1)]) as installed:
        model(x).backward()
        assert installed.report().rows[0].matched == {"relu": 1}


def test_an_inactive_policy_counts_nothing():
    with gp.install(model := Sums(), {"half": gp.Scale(5.0, ops=["add"], calls=[7])}) as installed:
        installed.set_active("half", False)
        assert factors(model, 3) == [1, 1, 1]


def test_compiled_whole():
    torch._dynamo.reset()
    model, x = Model(), torch.ones(1, requires_grad=True)
    weights = torch.arange(1.0, 8.0)
    with gp.install(model, [gp.Scale(5.0, ops=["add"], modules=["first", "second"], calls=[1])]):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            (found,) = torch.autograd.grad((compiled(x) * weights).sum(), x)
            assert found == weights.sum() + 4 * (weights[1] + weights[4])


def test_compiled_where_the_model_itself_counts():
    x = torch.ones(1, requires_grad=True)
    with gp.install(model := Sums(), [gp.Scale(5.0, ops=["add"], calls=[1])]):
        (found,) = torch.autograd.grad(torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum(), x)
        (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert found == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_of_the_whole_forward_counts_again_and_of_a_part_is_refused(use_reentrant):
    class Parts(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.part, self.whole = Sums(), whole

        def forward(self, x):
            if self.whole:
                return self.part(x)
            return checkpoint(self.part, x, use_reentrant=use_reentrant)

    policy = gp.UseRule(lambda g, i, o: 5.0 * g * (i[0] == i[0]), ops=["add"], calls=[1])
    with gp.install(model := Parts(whole=True), [policy]):
        assert factors(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), 3) == [1, 5, 1]
    with (
        gp.install(model := Parts(whole=False), [policy]),
        pytest.raises(gp.PolicyError, match="'add' runs in a checkpointed function"),
    ):
        model(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gp.Scale(0.5, ops="add", calls=-1),
            r"Scale\.calls: must be whole numbers from 0 on, got -1",
        ),
        (lambda: gp.Scale(0.5, ops="add", calls=["1"]), r"calls: must be whole numbers from 0 on, got '1'"),
        (lambda: gp.Scale(0.5, params="a", calls=1), r"calls: goes with ops= or modules="),
    ],
)
def test_wrong_numbers_are_refused(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()


def test_an_operation_of_several_calls_cannot_be_counted():
    with pytest.raises(gp.PolicyError, match="calls= cannot count operation 'categorical'"):
        gp.install(nn.Identity(), [gp.UseRule("identity", ops="categorical", calls=0)])


class Twice(nn.Module):
    """One encoder for two views, as a Siamese network has it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.encoder(x), self.encoder(2 * x)


def encoder_gradients(model, call=None):
    """Return the gradients of each result for the encoder's weight and for the input."""
    found = []
    for index in range(2):
        x = torch.ones(1, 2, requires_grad=True)
        model.zero_grad()
        (model if call is None else call)(x)[index].sum().backward()
        found.append((model.encoder.weight.grad, x.grad))
    return found


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("at", ["input", "output", "through"])
def test_one_call_of_a_module_by_its_number_in_every_forward(at, calls):
    plain = encoder_gradients(model := Twice())
    rule = gp.UseRule("scale", parameters={"factor": 5.0}, modules="encoder", at=at, calls=calls)
    with gp.install(model, [rule], strict=True):
        found = encoder_gradients(model)
    for call in range(2):
        if call != calls:
            expected = plain[call]
        elif at == "input":
            expected = (plain[call][0], 5 * plain[call][1])
        elif at == "output":
            expected = (5 * plain[call][0], 5 * plain[call][1])
        else:
            # From the output to the input, times what the model does before its encoder.
            expected = (None, torch.full((1, 2), 5.0 * (1 + call)))
        for one, other in zip(found[call], expected, strict=True):
            if other is None:
                assert one is None
            else:
                torch.testing.assert_close(one, other)


def test_two_policies_on_different_calls_of_one_module():
    plain = encoder_gradients(model := Twice())
    policies = [gp.Stop("zero", modules="encoder", calls=0), gp.Scale(3.0, modules="encoder", calls=1)]
    with gp.install(model, policies):
        (_, first), (_, second) = encoder_gradients(model)
    assert not first.any()
    assert torch.equal(second, 3 * plain[1][1])
    with pytest.raises(gp.PolicyError, match="'stop' stops the gradient"):
        gp.install(model, [policies[0], gp.Scale(3.0, modules="encoder", calls=[0, 1])])


def test_a_module_that_ran_less_often_is_an_error():
    message = "'scale': module 'encoder' ran 2 times in the outermost forward.* no call 2"
    with (
        pytest.raises(gp.PolicyError, match=message),
        gp.install(model := Twice(), [gp.Scale(5.0, modules="encoder", calls=2)]),
    ):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_calls_of_a_module_are_counted_in_a_checkpointed_model_and_refused_in_a_checkpointed_part(
    use_reentrant,
):
    policy = gp.Scale(5.0, modules="encoder", calls=1)
    with gp.install(model := Twice(), [policy]):
        expected = encoder_gradients(model)
        found = encoder_gradients(model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
        assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    model.forward = lambda x: (x, checkpoint(model.encoder, x, use_reentrant=use_reentrant))
    with (
        gp.install(model, [policy]),
        pytest.raises(gp.PolicyError, match=r"'encoder': calls= cannot count .* in a checkpointed function"),
    ):
        encoder_gradients(model)


def test_compiled_code_leaves_counted_modules_to_eager_mode():
    torch._dynamo.reset()
    with gp.install(model := Twice(), [gp.Scale(5.0, modules="encoder", calls=1)]):
        expected = encoder_gradients(model)
        found = encoder_gradients(model, torch.compile(model, backend="eager"))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="calls= cannot count the calls of a module in compiled code"):
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
    torch._dynamo.reset()
