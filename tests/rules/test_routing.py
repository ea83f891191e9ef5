import torch

from gradpolicy.rules.routing import first_input, on_device_of, times, to_first, zeros_for


def test_the_gradient_of_one_input_says_nothing_of_others():
    grad = torch.ones(2, 3)
    assert to_first(grad, (grad,)) is grad
    assert to_first(grad, (grad, grad, grad)) is grad


def test_what_was_broadcast_is_summed():
    grad = torch.arange(6.0).reshape(2, 3)
    assert to_first(grad, (torch.zeros(3),)).tolist() == [3.0, 5.0, 7.0]
    assert to_first(grad, (torch.zeros(2, 1),)).tolist() == [[3.0], [12.0]]
    assert to_first(grad, (torch.tensor(0.0),)).item() == 15.0


def test_a_shape_that_does_not_broadcast_is_left_for_the_caller_to_refuse():
    assert to_first(torch.ones(2, 3), (torch.zeros(4),)).shape == (2, 3)


def test_integers_have_no_zero_gradient():
    assert zeros_for(torch.ones(2, dtype=torch.int64)) is None
    assert zeros_for(torch.ones(2, dtype=torch.float16)).dtype == torch.float16


def test_plain_numbers_stay_plain():
    assert on_device_of(2.0, torch.ones(1)) == 2.0
    assert on_device_of(torch.tensor(2.0), torch.ones(1)).item() == 2.0


def test_a_factor_of_one_takes_no_pass_over_the_values():
    values = torch.tensor([1.0, -2.0])
    assert times(1.0, values) is values
    assert times(3, values).tolist() == [3.0, -6.0]
    assert times(torch.tensor(1.0), values) is not values


def test_the_first_input_that_can_have_a_gradient_gets_it():
    condition, x = torch.tensor([True, False]), torch.ones(2)
    assert to_first(torch.ones(3, 2), (condition, x, x)).shape == x.shape
    assert first_input((condition, x)) is x
    assert first_input((condition,)) is condition
