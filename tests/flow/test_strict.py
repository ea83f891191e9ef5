"""``strict=True`` is a promise: every policy at every place acts as a reference by hand says, or raises.

The reference is plain torch: a hook on an alias, or ``detach``.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp


class Part(nn.Module):
    """An operation of one input between two of several."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.mul(torch.relu(F.linear(x, self.weight)), self.gain)


class Model(nn.Module):
    """A part between two layers, and how it is run."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.before, self.part, self.after = nn.Linear(3, 3), Part(), nn.Linear(3, 2)
        if "frozen below" in way:
            self.before.requires_grad_(False)

    def forward(self, x):
        h, part = self.before(x), self.part
        if "reused" in self.way:
            h = part(part(h))
        elif "bypassed" in self.way:
            h = torch.mul(torch.relu(F.linear(h, part.weight)), part.gain)
        elif self.way.startswith("checkpointed"):
            h = checkpoint(part, h, use_reentrant=self.way.endswith("reentrant"))
        else:
            h = part(h)
        return self.after(h)


def altered(tensor, change):
    """An alias of a tensor; its gradient is changed, or cut off where there is no change."""
    if change is None:
        return tensor.detach()
    alias = tensor.clone()
    if alias.requires_grad:
        alias.register_hook(change)
    return alias


def replaced(value, tensor, change):
    """A value whose gradient goes to a tensor, changed, and nowhere else."""
    passed = altered(tensor, change)
    return value.detach() + (passed - passed.detach())


def clip_norm(grad):
    return grad * (0.3 / grad.norm()).clamp(max=1.0)


def three_times_input(grad, inputs, output):
    return 3.0 * grad * inputs[0]


def for_both_inputs(grad, inputs, output):
    return 2.0 * grad, 3.0 * grad.sum(0)


# The policies that change a gradient, each with the change; None cuts.
CHANGES = {
    "stop": (gp.Stop, None),
    "stop by zeros": (lambda **where: gp.Stop("zero", **where), torch.zeros_like),
    "scale": (lambda **where: gp.Scale(0.5, **where), lambda g: 0.5 * g),
    "reverse": (lambda **where: gp.Reverse(2.0, **where), lambda g: -2.0 * g),
    "clip by value": (lambda **where: gp.Clip(value=0.1, **where), lambda g: g.clamp(-0.1, 0.1)),
    "clip by norm": (lambda **where: gp.Clip(norm=0.3, **where), clip_norm),
    "a function": (lambda **where: gp.UseRule(lambda g, i, o: 3.0 * g, **where), lambda g: 3.0 * g),
    "a rule that filters": (lambda **where: gp.UseRule("deconv_relu", **where), torch.relu),
}
# What takes an operation's gradient, or that of a whole module, away and gives it another.
REPLACES = {
    "straight through": (gp.StraightThrough, lambda g, x: g),
    "the input": (lambda **where: gp.UseRule(three_times_input, **where), lambda g, x: 3.0 * g * x),
    "deconv": (gp.Deconv, lambda g, x: torch.relu(g)),
}
# What only an operation of several inputs takes.
FOR_SEVERAL = {
    "own function": lambda **where: gp.UseRule(lambda own, i, o: (own[0], 3.0 * own[1]), own=True, **where),
    "a function of both": lambda **where: gp.UseRule(for_both_inputs, **where),
}
OWN = ("stop", "stop by zeros", "scale", "reverse", "clip by value", "clip by norm")
WHERE = {
    "operation": {"ops": "relu", "modules": "part"},
    "operation of several inputs": {"ops": "mul", "modules": "part"},
    "input": {"modules": "part"},
    "output": {"modules": "part", "at": "output"},
    "through": {"modules": "part", "at": "through"},
    "parameter": {"params": "part.weight"},
}
WAYS = (
    "plain",
    "reused",
    "bypassed",
    "frozen below",
    "scripted",
    "traced",
    "checkpointed",
    "checkpointed, reentrant",
    "compiled",
    "compiled, reused",
    "compiled, bypassed",
    "compiled, frozen below",
)
KINDS = {
    "operation": [*OWN, *REPLACES, "guided"],
    "operation of several inputs": [*OWN, "straight through", "the input", *FOR_SEVERAL],
    "input": list(CHANGES),
    "output": list(CHANGES),
    "through": [*OWN, "straight through", "the input"],
    "parameter": list(CHANGES),
}


def policy_of(kind, place):
    make = {"guided": gp.Guided, **FOR_SEVERAL}.get(kind) or {**CHANGES, **REPLACES}[kind][0]
    return make(**WHERE[place])


def expected_part(kind, place, h, weight, gain):
    """Return the result of the part, with the gradients of the policy made by hand."""
    change = CHANGES[kind][1] if kind in CHANGES else None
    if place == "input":
        h = altered(h, change)
    a = F.linear(h, weight)
    if place != "operation":
        b = torch.relu(a)
    elif kind == "guided":
        b = altered(torch.relu(a), torch.relu)
    elif kind in REPLACES:
        b = replaced(torch.relu(a), a, lambda g: REPLACES[kind][1](g, a.detach()))
    else:
        b = torch.relu(altered(a, change))
    if place != "operation of several inputs":
        c = torch.mul(b, gain)
    elif kind == "own function":
        c = torch.mul(b, altered(gain, lambda g: 3.0 * g))
    elif kind == "a function of both":
        c = replaced(b * gain, b, lambda g: 2.0 * g) + 3.0 * (gain - gain.detach())
    else:
        c = torch.mul(altered(b, change), altered(gain, change))
    return altered(c, change) if place == "output" else c


def expected(model, kind, place, x):
    """The gradients by hand."""
    names = dict(model.named_parameters())
    weight, gain = names["part.weight"], names["part.gain"]
    if place == "parameter":
        # One alias for all uses: its gradient is their sum. Behind it nothing could be cut off.
        weight, place_in_part = altered(weight, CHANGES[kind][1] or torch.zeros_like), "elsewhere"
    else:
        place_in_part = place

    def part(h):
        if place != "through":
            return expected_part(kind, place_in_part, h, weight, gain)
        values = expected_part(kind, "elsewhere", h.detach(), weight.detach(), gain.detach())
        if kind in REPLACES:
            return replaced(values, h, lambda g: REPLACES[kind][1](g, h.detach()))
        return values.detach() if kind == "stop" else replaced(values, h, CHANGES[kind][1])

    h = model.before(x)
    h = part(part(h)) if "reused" in model.way else part(h)
    return gradients(model.after(h), names, x)


def gradients(result, names, x):
    """Return the gradients of the input and the parameters after a backward pass."""
    leaves = {"x": x, **names}
    for tensor in leaves.values():
        tensor.grad = None
    # Not autograd.grad, which a reentrant checkpoint refuses.
    (result * torch.tensor([1.0, -2.0])).sum().backward()
    return {name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in leaves.items()}


def inner(model, way, x):
    """The model with its part as the way has it; compiled where it is that way."""
    if way == "scripted":
        model.part = torch.jit.script(model.part)
    elif way == "traced":
        model.part = torch.jit.trace(model.part, torch.randn(5, 3))
    return torch.compile(model, backend="eager") if "compiled" in way else model


# One policy of each sort is enough in every run, but for the plain way.
QUICK = ("stop", "scale", "the input", "own function", "a function")


def is_slow(way, kind):
    return way != "plain" and (
        kind not in QUICK or ("compiled" in way and (way, kind) != ("compiled", "scale"))
    )


CASES = [
    pytest.param(way, place, kind, id=f"{way}-{place}-{kind}", marks=[pytest.mark.slow] * is_slow(way, kind))
    for way in WAYS
    for place in WHERE
    for kind in KINDS[place]
]


def is_refused(way, place, kind):
    """Return True if nothing can act there, or the meaning is ambiguous."""
    if place == "operation of several inputs" and kind in ("straight through", "the input"):
        return True
    if "bypassed" in way or way in ("scripted", "traced"):
        return place != "parameter"
    if "frozen below" in way:
        # A stop through the module cuts off what is within, whether or not its input needs a gradient.
        return place == "input" or (place == "through" and kind != "stop")
    # Torch itself refuses a reentrant checkpoint of which no result needs a gradient.
    cuts_all = kind == "stop" and place in ("operation of several inputs", "output", "through")
    return way.endswith("reentrant") and cuts_all


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "place", "kind"), CASES)
def test_strict_policy_acts_or_raises(way, place, kind):
    if "compiled" in way:
        torch._dynamo.reset()
    torch.manual_seed(3)
    model, x = Model(way), torch.randn(5, 3, requires_grad="frozen below" not in way)
    wanted = expected(model, kind, place, x)
    run = inner(model, way, x)
    policy = {"it": policy_of(kind, place)}
    if is_refused(way, place, kind):
        with pytest.raises((gp.PolicyError, RuntimeError), match=r"policy 'it'|this checkpoint\(\)"):
            strict_gradients(model, run, policy, x)
        return
    torch.testing.assert_close(strict_gradients(model, run, policy, x), wanted)


def strict_gradients(model, run, policies, x):
    names = dict(model.named_parameters())
    with gp.install(model, policies, strict=True):
        found = gradients(run(x), names, x)
        if model.way == "plain":
            # A copy, and torch.func, give the same.
            copied = copy.deepcopy(model)
            torch.testing.assert_close(gradients(copied(x), dict(copied.named_parameters()), x), found)
            zeros = {name: torch.zeros_like(tensor) for name, tensor in {"x": x, **names}.items()}
            filled = {name: zeros[name] if one is None else one for name, one in found.items()}
            torch.testing.assert_close(functional_gradients(model, names, x), filled)
    return found


def functional_gradients(model, names, x):
    """Return the gradients by ``torch.func``."""

    def loss(parameters, x):
        return (torch.func.functional_call(model, parameters, (x,)) * torch.tensor([1.0, -2.0])).sum()

    detached = {name: parameter.detach() for name, parameter in names.items()}
    of_parameters, of_input = torch.func.grad(loss, argnums=(0, 1))(detached, x.detach())
    return {"x": of_input, **of_parameters}


class Attention(nn.Module):
    """Attention that is written out, of torch, or none."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "torch's":
            return F.scaled_dot_product_attention(x, x, x)
        return torch.softmax(x @ x.mT, -1) @ x if self.kind == "written out" else x


@pytest.mark.parametrize(
    ("modules", "kinds", "bare"),
    [
        (["0", "1"], ["written out", "torch's"], None),
        (["0", "1", "2"], ["written out", "none", "torch's"], "'1'"),
        ("*", ["written out", "none", "torch's"], "'1'"),
        (["*", "!1"], ["written out", "none", "torch's"], None),
        (Attention, ["none", "torch's", "none", "written out"], "'0', '2'"),
    ],
)
def test_each_matched_module_meets_one_of_the_operations(modules, kinds, bare):
    model, x = nn.Sequential(*map(Attention, kinds)), torch.randn(1, 5, 3, requires_grad=True)
    policy = gp.Stop("zero", ops=["softmax", "scaled_dot_product_attention"], modules=modules)
    refused = (
        pytest.raises(gp.PolicyError, match=f"ran in module {bare}:") if bare else contextlib.nullcontext()
    )
    with refused, gp.install(model, [policy], strict=True):
        model(x)
