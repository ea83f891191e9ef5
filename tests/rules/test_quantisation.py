import math

import pytest
import torch

from gradpolicy import PolicyError, get_rule


def quantise(values, step, lowest=-4, highest=3):
    return torch.round(torch.clamp(values / step, lowest, highest)) * step


@pytest.mark.parametrize(
    ("bits", "signed", "values", "inside", "by_hand", "positive"),
    [
        (3, True, [-9.0, 0.3, 2.6, 8.0], [0, 1, 1, 0], -4 - 0.3 * 2 + 0.4 * 3 + 3 * 4, 3),
        (3, True, [-9.0, -3.9, 0.2, 2.9], [0, 1, 1, 1], -4 - 0.1 * 2 - 0.2 * 3 + 0.1 * 4, 3),
        (4, False, [-1.0, 0.5, 20.0, 3.0], [0, 1, 0, 1], -0.5 * 2 + 15 * 3, 15),
    ],
)
def test_lsq(bits, signed, values, inside, by_hand, positive):
    grad, x, step = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(values), torch.tensor(1.0)
    grad_values, grad_step = get_rule("lsq", bits=bits, signed=signed)(grad, (x, step), x)
    assert torch.equal(grad_values, grad * torch.tensor(inside))
    assert grad_step.item() == pytest.approx(by_hand / math.sqrt(4 * positive))


def test_lsq_counts_the_values_that_share_a_step():
    values, steps = torch.randn(4, 6), torch.rand(4, 1) + 0.2
    grad = torch.randn(4, 6)
    whole = get_rule("lsq", bits=3)
    _, together = whole(grad, (values, steps), quantise(values, steps))
    assert together.shape == (4, 1)
    for row in range(4):
        _, alone = whole(grad[row], (values[row], steps[row, 0]), grad[row])
        torch.testing.assert_close(together[row, 0], alone)
    _, counted = get_rule("lsq", bits=3, count=24)(grad, (values, steps), grad)
    torch.testing.assert_close(counted, together / 2)


def test_lsq_says_what_it_needs():
    x = torch.ones(2)
    with pytest.raises(PolicyError, match=r"'lsq': expects the inputs \(values, step\), got 1"):
        get_rule("lsq")(x, (x,), x)
    with pytest.raises(PolicyError, match="'lsq': bits=1 leaves no positive point"):
        get_rule("lsq", bits=1)(x, (x, x), x)


def rotation_matrix(source, target):
    """The rotation in the plane of two vectors that takes the one's direction to the other's (Rodrigues)."""
    a, b = source / source.norm(), target / target.norm()
    turn = torch.outer(b, a) - torch.outer(a, b)
    return torch.eye(len(a), dtype=a.dtype) + turn + turn @ turn / (1 + a @ b)


@pytest.mark.parametrize("size", [2, 3, 16])
def test_rotation_equals_the_rotation_matrix(size):
    e, q, grad = torch.randn(3, 7, size, dtype=torch.float64)
    got = get_rule("rotation")(grad, (e,), q)
    for row in range(7):
        matrix = q[row].norm() / e[row].norm() * rotation_matrix(e[row], q[row])
        torch.testing.assert_close(matrix @ e[row], q[row])
        torch.testing.assert_close(got[row], matrix.T @ grad[row])


def test_rotation_of_vectors_without_direction_gives_numbers():
    e = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    q = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    grad = torch.ones(3, 2)
    assert get_rule("rotation")(grad, (e,), q).tolist() == [[1.0, 1.0], [-1.0, 1.0], [0.0, 0.0]]
