"""The relaxations of rounding against autograd through their own formulas."""

import pytest
import torch

import gradpolicy as gp

X = torch.linspace(-2.3, 2.6, 41, dtype=torch.float64)
# Where the steps lie: at integers plus this.
OFFSETS = {"round": 0.5, "floor": 0.0, "ceil": 0.0}


def soft_staircase(x, temperature, offset):
    """Agustsson and Theis's soft rounding, equation 6, moved so that its steps lie at integers + offset."""
    x = x - offset + 0.5
    below = torch.floor(x).detach()
    rest = x - below - 0.5
    return below + torch.tanh(rest / temperature) / torch.tanh(torch.tensor(0.5 / temperature)) / 2 + 0.5


def sum_of_sigmoids(x, temperature, offset):
    steps = torch.arange(-40, 41, dtype=x.dtype) + offset
    return torch.sigmoid((x[..., None] - steps) / temperature).sum(-1)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.35])
@pytest.mark.parametrize("operation", OFFSETS)
@pytest.mark.parametrize(
    ("name", "smooth"), [("soft_round", soft_staircase), ("sigmoid_sum", sum_of_sigmoids)]
)
def test_it_is_the_derivative_of_its_staircase_at_every_step(name, smooth, operation, temperature):
    x = X.clone().requires_grad_()
    # The staircase of tanh curves has its half-steps at integers: that of `round` rises at half-integers.
    offset = (
        OFFSETS[operation] + (0.5 if name == "soft_round" else 0.0) - (0.5 if name == "soft_round" else 0)
    )
    expected = torch.autograd.grad(smooth(x, temperature, offset).sum(), x)[0]
    with gp.gradient_override(
        {
            operation: gp.get_rule(
                name, temperature=temperature, **({"reach": 12} if name == "sigmoid_sum" else {})
            )
        }
    ):
        y = getattr(torch, operation)(x)
    found = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum"])
def test_the_mean_over_a_step_is_one(name):
    x = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    found = gp.get_rule(name, temperature=0.1)(torch.ones_like(x), (x,), x)
    assert found.mean() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum"])
@pytest.mark.parametrize(
    ("operation", "call", "width", "rise"),
    [
        ("round", lambda x: torch.round(x, decimals=1), 0.1, 0.1),
        ("floor_divide", lambda x: x // 2, 2.0, 1.0),
        ("floor_divide", lambda x: torch.div(x, torch.tensor(-0.5), rounding_mode="floor"), 0.5, -1.0),
        ("int", lambda x: x.int().double(), 1.0, 1.0),
    ],
)
def test_steps_of_another_width_are_those_of_round_stretched(name, operation, call, width, rise):
    rule = gp.get_rule(name, temperature=0.2)
    distance = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)[1:-1]
    x = (width * (3 + OFFSETS.get(operation, 0.0) + distance)).requires_grad_()
    with gp.gradient_override({operation: rule}):
        (found,) = torch.autograd.grad(call(x).sum(), x)
    expected = rise / width * rule(torch.ones_like(distance), (0.5 + distance,), distance)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum", "gumbel", "reinmax"])
@pytest.mark.parametrize("temperature", [0, -1.0, "warm", None, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(name, temperature):
    x = torch.tensor([0.2, 0.7], requires_grad=True)
    y = gp.apply(gp.get_rule(name, temperature=temperature), torch.round, x)
    with pytest.raises(gp.PolicyError, match=f"'{name}'.* temperature must be a number above 0, .* got"):
        y.sum().backward()


def test_a_large_temperature_is_the_identity_and_a_small_one_a_peak():
    x = torch.tensor([0.0, 0.5])
    warm = gp.get_rule("soft_round", temperature=50.0)(torch.ones(2), (x,), x)
    torch.testing.assert_close(warm, torch.ones(2), rtol=1e-3, atol=1e-3)
    cold = gp.get_rule("soft_round", temperature=0.05)(torch.ones(2), (x,), x)
    assert cold[0] < 1e-6
    assert cold[1] > 9


@pytest.mark.parametrize("name", ["soft_round", "sigmoid_sum"])
def test_a_schedule_cools_it(name):
    policy = gp.StraightThrough(
        name, parameters={"temperature": gp.schedules.Exponential(1.0, 0.1, steps=10)}, ops=["round"]
    )

    class Rounds(torch.nn.Module):
        def forward(self, x):
            return torch.round(x)

    x = torch.full((1,), 0.5, requires_grad=True)
    with gp.install(model := Rounds(), [policy]) as installed:
        found = []
        for step in (0, 5, 10):
            installed.update(step=step)
            found.append(torch.autograd.grad(model(x).sum(), x)[0].item())
    assert found == sorted(found)
    assert found[-1] > 2 * found[0]


class TestGradientOf:
    def test_it_is_the_exact_derivative_of_the_function_at_the_same_inputs(self):
        smooth = gp.gradient_of(lambda x: x - torch.sin(2 * torch.pi * x) / (2 * torch.pi))
        x = X.clone().requires_grad_()
        with gp.gradient_override({"floor": smooth}):
            y = torch.floor(x)
        assert torch.equal(y, torch.floor(X))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 1 - torch.cos(2 * torch.pi * X))

    def test_its_parameters_may_be_scheduled(self):
        rule = gp.gradient_of(
            lambda x, slope: torch.tanh(slope * x), slope=gp.schedules.Linear(1.0, 3.0, steps=2)
        )
        layer, x = torch.nn.Identity(), torch.zeros(1, requires_grad=True)
        with gp.install(layer, [gp.UseRule(rule, modules="*", at="through")]) as installed:
            for step in range(3):
                installed.update(step=step)
                assert torch.autograd.grad(layer(x).sum(), x)[0] == 1.0 + step

    def test_inputs_that_have_no_gradient_are_passed_to_it(self):
        rule = gp.gradient_of(lambda condition, a, b: torch.where(condition, a**2, 3 * b))
        a, b = torch.tensor([2.0, 2.0], requires_grad=True), torch.tensor([1.0, 1.0], requires_grad=True)
        with gp.gradient_override({"where": rule}):
            torch.where(torch.tensor([True, False]), a, b).sum().backward()
        assert a.grad.tolist() == [4.0, 0.0]
        assert b.grad.tolist() == [0.0, 3.0]

    def test_a_path_names_the_function_and_what_is_none_is_refused(self):
        assert gp.gradient_of("torch.nn.functional.softplus").name == "gradient of softplus"
        with pytest.raises(gp.PolicyError, match="function of tensors or its path, got 3"):
            gp.gradient_of(3)
        with pytest.raises(gp.PolicyError, match="cannot be imported"):
            gp.gradient_of("torch.nn.functional.sofplus")

    def test_compiled(self):
        smooth = gp.gradient_of(torch.sin)
        x = torch.tensor([0.3, 2.0], requires_grad=True)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(x):
            with gp.gradient_override({"round": "soft_round"}):
                return torch.floor(x) + torch.round(x)

        with gp.gradient_override({"floor": smooth}):
            found = torch.autograd.grad(run(x).sum(), x)[0]
        soft = gp.get_rule("soft_round")(torch.ones(2), (x.detach(),), x.detach(), gp.Call("round"))
        torch.testing.assert_close(found, torch.cos(x.detach()) + soft)


def soft_sorted(x, places, descending, temperature):
    """SoftSort as its paper writes it, in the last dimension."""
    chosen = x.sort(dim=-1, descending=descending).values[..., :places]
    distances = (chosen[..., :, None] - x[..., None, :]).abs()
    return (torch.softmax(-distances / temperature, dim=-1) @ x[..., None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("largest", [False, True])
def test_soft_sort_of_the_first_places_is_that_of_the_paper(temperature, dim, largest):
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with gp.gradient_override({"topk": gp.get_rule("soft_sort", temperature=temperature)}):
        found = torch.topk(x, 2, dim=dim, largest=largest).values
    weights = torch.randn_like(found)
    (grad,) = torch.autograd.grad((found * weights).sum(), x)
    expected = soft_sorted(x.movedim(dim, -1), 2, largest, temperature).movedim(-1, dim)
    torch.testing.assert_close(grad, torch.autograd.grad((expected * weights).sum(), x)[0])


def test_soft_sort_of_all_places_becomes_the_gradient_of_sorting_as_it_cools():
    x, weights = torch.tensor([3.0, 1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    with gp.gradient_override({"sort": gp.get_rule("soft_sort", temperature=0.01)}):
        (x.sort().values * weights).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([3.0, 1.0, 2.0]))
