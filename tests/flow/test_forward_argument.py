import pytest
import torch
from torch import nn

import gradpolicy as gp


class Criterion(nn.Module):
    """A loss of two arguments, so that the gradient of each tells what its policy did."""

    def forward(self, p, z, *rest, weight=None):
        total = (p * z).sum() + sum((2 * tensor).sum() for tensor in rest)
        return total if weight is None else total + (3 * weight["value"]).sum()


def gradients(policy, *, by_name=False):
    p, z = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    rest, weight = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with gp.install(criterion := Criterion(), [policy]):
        if by_name:
            result = criterion(z=z, p=p, weight={"value": weight})
        else:
            result = criterion(p, z, rest, weight={"value": weight})
        result.backward()
    return [tensor.grad if tensor.grad is None else tensor.grad.item() for tensor in (p, z, rest, weight)]


@pytest.mark.parametrize("argument", ["z", 1])
def test_a_stop_on_one_argument_by_name_or_position_however_it_is_given(argument):
    policy = gp.Stop(modules=Criterion, argument=argument)
    assert gradients(policy) == [5.0, None, 2.0, 3.0]
    assert gradients(policy, by_name=True) == [5.0, None, None, 3.0]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [(0, [50.0, 2.0, 2.0, 3.0]), (2, [5.0, 2.0, 20.0, 3.0]), ("weight", [5.0, 2.0, 2.0, 30.0])],
)
def test_every_policy_at_the_input_takes_one(argument, expected):
    assert gradients(gp.Scale(10.0, modules=Criterion, argument=argument)) == expected


def test_the_same_tensor_as_two_arguments_is_stopped_at_one():
    x = torch.tensor([3.0], requires_grad=True)
    with gp.install(criterion := Criterion(), [gp.Stop(modules=Criterion, argument="z")]):
        criterion(x, x).backward()
    assert x.grad == 3.0


def test_policies_on_different_arguments_go_together_and_with_one_on_all():
    policies = [
        gp.Scale(10.0, modules=Criterion, argument="p"),
        gp.Stop(modules=Criterion, argument="z"),
    ]
    p, z = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    with gp.install(criterion := Criterion(), [*policies]):
        criterion(p, z).backward()
    assert (p.grad, z.grad) == (50.0, None)
    with gp.install(criterion, [gp.Clip(value=4.0, modules=Criterion), policies[0]]):
        p.grad = None
        criterion(p, z).backward()
    assert (p.grad, z.grad) == (40.0, 2.0)
    with pytest.raises(gp.PolicyError, match="contradict each other at the input of module ''"):
        gp.install(criterion, [gp.Scale(2.0, modules=Criterion), policies[1]])


def test_a_named_argument_in_compiled_code():
    criterion = Criterion()
    p, z = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    with gp.install(criterion, [gp.Scale(10.0, modules=Criterion, argument="z")]):
        torch.compile(criterion, backend="aot_eager", fullgraph=True)(p, z).backward()
    assert (p.grad, z.grad) == (5.0, 20.0)


def test_an_argument_of_another_entry_point():
    class Encoder(nn.Module):
        def encode(self, image, text):
            return (image * text).sum()

    a, b = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    model = nn.ModuleDict({"part": Encoder()})
    policy = gp.Scale(10.0, modules="part", argument="text")
    with gp.install(model, [policy], entry_points={"part": ["encode"]}):
        model["part"].encode(a, text=b).backward()
    assert (a.grad, b.grad) == (5.0, 20.0)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("q", r"policy 'cut' at module '': unknown argument 'q'; .*'p'"),
        (7, None),
    ],
)
def test_an_argument_that_the_forward_does_not_take_is_an_error(argument, message):
    policies = {"cut": gp.Stop(modules=Criterion, argument=argument)}
    if message is None:
        # It has *rest.
        gp.install(Criterion(), policies).remove()
        policies, message = {"cut": gp.Stop(modules="0", argument=1)}, r"takes 1: input"
        with pytest.raises(gp.PolicyError, match=message):
            gp.install(nn.Sequential(nn.Linear(2, 2)), policies)
        return
    with pytest.raises(gp.PolicyError, match=message):
        gp.install(Criterion(), policies)


def test_what_collects_several_arguments_is_no_argument():
    class Collects(nn.Module):
        def forward(self, *rest, **more):
            return rest[0] + more["a"]

    for argument, message in {"rest": r"'rest' is \*rest, .* position of one", "more": "name of one"}.items():
        with pytest.raises(gp.PolicyError, match=message):
            gp.install(Collects(), [gp.Stop(modules=Collects, argument=argument)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gp.Stop(modules="a", at="output", argument="z"), r"Stop\.argument: is of the input"),
        (lambda: gp.Stop(params="*", argument="z"), r"Stop: argument= goes with modules= or ops="),
        (lambda: gp.Stop(modules="a", argument=-1), r"argument: positions count from 0, got -1"),
        (lambda: gp.Stop(modules="a", argument=True), r"argument: must be a name or a number, got True"),
        (lambda: gp.Stop(modules="a", output=0), r"Stop\.output: goes with at='through'"),
        (lambda: gp.Stop(modules="a", inside="own"), r"Stop\.inside: goes with at='through'"),
        (lambda: gp.Stop(modules="a", at="through", inside="all"), r"Stop\.inside: unknown choice 'all'"),
        (
            lambda: gp.Stop(modules="a", at="through", output=1.5),
            r"output: must be a name or a number, got 1.5",
        ),
        (lambda: gp.Guided(modules="a", at="through"), r"Guided: at='through' goes with modules= alone"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()
