import math

import pytest
import torch
from torch.nn import functional

from gradpolicy import PolicyError, get_rule, gradcheck_rule, rule
from gradpolicy.rules.gradcheck import enumerate_bits, enumerate_categories

X = torch.tensor([[-1.5, 0.4], [0.9, 2.0]])


def own(function):
    """The true gradient as a rule, by autograd: a reference of its own for the differences."""

    def true_gradient(grad, inputs, output):
        with torch.enable_grad():
            points = [tensor.detach().requires_grad_() for tensor in inputs]
            return torch.autograd.grad(function(*points), points, grad)

    return true_gradient


@pytest.mark.parametrize("function", [torch.sin, torch.exp, functional.gelu, lambda x: torch.softmax(x, 1)])
def test_the_true_gradient_is_exact(function):
    check = gradcheck_rule(own(function), function, X)
    assert check.exact
    assert check.deviation < 1e-8
    assert check.length_ratio == pytest.approx(1)
    assert "is exact" in str(check)


def test_the_true_gradient_of_several_inputs_is_exact():
    inputs = (torch.randn(2, 3), torch.randn(3, 4))
    check = gradcheck_rule(own(torch.matmul), torch.matmul, inputs)
    assert check.exact
    assert len(check.by_input) == 2


def test_a_rule_that_is_too_long_is_told_by_how_much():
    check = gradcheck_rule(get_rule("scale", factor=1.7), torch.clone, X)
    assert not check.exact
    assert check.length_ratio == pytest.approx(1.7)
    assert check.cosine == pytest.approx(1)
    assert check.relative_deviation == pytest.approx(0.7)
    assert "1.7 x longer; cosine 1.00" in str(check)


def test_a_reversed_rule_points_the_other_way():
    check = gradcheck_rule("reverse", torch.clone, X)
    assert check.cosine == pytest.approx(-1)
    assert check.sign_agreement == 0
    assert "cosine -1.00" in str(check)


def test_a_straight_through_rule_passes_where_the_true_gradient_is_zero():
    check = gradcheck_rule("identity", torch.round, X)
    assert not check.exact
    assert check.passes_where_zero == 1
    assert check.length_ratio == math.inf
    assert math.isnan(check.cosine)
    assert "passes gradient where the true one is 0 (100% of the entries)" in str(check)


def test_a_rule_that_stops_is_told():
    check = gradcheck_rule("stop", torch.exp, X)
    assert check.stops_where_not == 1
    assert check.length_ratio == 0
    assert "no gradient at all; stops gradient where the true one is not 0" in str(check)


def test_guided_departs_by_its_negative_gradients():
    check = gradcheck_rule("guided_relu", torch.relu, X)
    assert check.passes_where_zero == 0
    assert 0 < check.stops_where_not < 1
    assert 0 < check.cosine < 1


def test_the_largest_deviation_is_located():
    def wrong_at_one_place(grad, inputs, output):
        wrong = grad.clone()
        wrong[1, 0] += 5
        return wrong

    check = gradcheck_rule(wrong_at_one_place, torch.clone, X, cotangents=1)
    assert check.where == (0, 1, 0)
    assert check.deviation == pytest.approx(5)
    assert check.rule_value - check.true_value == pytest.approx(5)
    assert "largest at input 0 [1, 0]" in str(check)


def test_each_input_is_told_apart():
    def second_is_doubled(grad, inputs, output):
        first, second = own(torch.mul)(grad, inputs, output)
        return first, 2 * second

    check = gradcheck_rule(second_is_doubled, torch.mul, (X, X + 1))
    assert check.by_input[0].deviation < 1e-8
    assert check.by_input[1].length_ratio == pytest.approx(2)
    assert "input 1: 2 x longer" in str(check)


def test_kinks_and_jumps_are_left_out_and_counted():
    check = gradcheck_rule(own(functional.hardtanh), functional.hardtanh, torch.tensor([1.0, 0.3, -2.0]))
    assert check.exact
    assert check.left_out == 1
    assert gradcheck_rule("stop", torch.round, torch.tensor([0.5, 0.2])).left_out == 1
    assert "left out at a kink or jump: 1" in str(check)


def test_strong_curvature_is_no_kink():
    check = gradcheck_rule(own(lambda x: torch.sin(50 * x)), lambda x: torch.sin(50 * x), X)
    assert check.left_out == 0


def test_nothing_but_kinks_is_an_error():
    with pytest.raises(PolicyError, match="every entry lies at a kink"):
        gradcheck_rule("identity", torch.abs, torch.zeros(2))


def test_integer_inputs_are_given_as_they_are():
    def rule_for_rows(grad, inputs, output):
        return torch.zeros_like(inputs[0]).index_add(0, inputs[1], grad), None

    check = gradcheck_rule(rule_for_rows, lambda x, rows: x[rows], (X, torch.tensor([1, 1, 0])))
    assert check.exact
    assert len(check.by_input) == 1


def test_none_counts_as_zeros():
    assert gradcheck_rule(lambda grad, inputs, output: None, torch.round, X).exact


def test_not_a_number_is_never_exact():
    check = gradcheck_rule(lambda grad, inputs, output: grad * math.nan, torch.clone, X)
    assert not check.exact


def test_a_random_forward_needs_its_outcomes():
    with pytest.raises(PolicyError, match="random; give outcomes="):
        gradcheck_rule("bernoulli", torch.bernoulli, torch.full((20,), 0.5))


def test_a_wrong_number_or_shape_of_gradients_names_the_rule():
    @rule("gradcheck_test_wrong")
    def wrong(grad, inputs, output):
        return grad, grad

    with pytest.raises(PolicyError, match="'gradcheck_test_wrong' returned 2 gradients for 1 inputs"):
        gradcheck_rule("gradcheck_test_wrong", torch.clone, X)
    with pytest.raises(PolicyError, match=r"returned a gradient of shape \(\) for input 0 of shape \(2, 2\)"):
        gradcheck_rule(lambda grad, inputs, output: grad.sum(), torch.clone, X)


def test_what_is_no_tensor_names_the_rule():
    with pytest.raises(PolicyError, match=r"returned 2.0 for input 0, not a tensor"):
        gradcheck_rule(lambda grad, inputs, output: 2.0, torch.clone, X)


def test_transposed_inputs_are_checked_in_their_own_order():
    check = gradcheck_rule(own(torch.exp), torch.exp, torch.randn(2, 3).mT)
    assert check.exact


def test_integers_alone_cannot_be_checked():
    with pytest.raises(PolicyError, match="no floating-point input"):
        gradcheck_rule("identity", torch.clone, torch.arange(3))


def test_outcomes_are_complete():
    bits = list(enumerate_bits(torch.tensor([0.2, 0.7], dtype=torch.float64)))
    assert sum(float(chance) for chance, _ in bits) == pytest.approx(1)
    assert sorted(output.tolist() for _, output in bits) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    categories = list(enumerate_categories(torch.tensor([0.0, 1.0, 2.0])))
    assert sum(float(chance) for chance, _ in categories) == pytest.approx(1)


def test_the_same_seed_gives_the_same_figures():
    assert gradcheck_rule("tanh", torch.sin, X, seed=3) == gradcheck_rule("tanh", torch.sin, X, seed=3)
    assert gradcheck_rule("tanh", torch.sin, X, seed=3) != gradcheck_rule("tanh", torch.sin, X, seed=4)
