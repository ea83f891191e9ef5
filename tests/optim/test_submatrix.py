"""Rows and columns move as under the same optimizer run on them alone.

The references gather the active rows or columns by hand, and run the optimizer on them alone.
"""

import pytest
import pytorch_optimizer
import torch

import gradpolicy as gp
from tests.optim.alone import FROZEN_STATES, follow_course

# --- the optimizers by hand


class MuonByHand:
    """Muon on the active submatrix, with the momentum of its entries."""

    def __init__(self, make, start):
        self.make, self.value, self.momentum = make, start.clone(), torch.zeros_like(start)

    def forget(self, frozen):
        self.momentum[frozen] = 0

    def step(self, gradient, mask, lr):
        part = torch.nn.Parameter(self.value[mask].view(mask.any(1).sum(), mask.any(0).sum()))
        optimizer = self.make([part])
        optimizer.param_groups[0]["lr"] = lr
        optimizer.state[part]["momentum_buffer"] = self.momentum[mask].view_as(part)
        part.grad = gradient[mask].view_as(part)
        optimizer.step()
        self.value[mask] = part.detach().flatten()
        self.momentum[mask] = optimizer.state[part]["momentum_buffer"].flatten()


class AdafactorByHand:
    """Adafactor on the active rows, with one step count and, of a matrix, one column statistic."""

    def __init__(self, make, start):
        self.make, self.value = make, start.clone()
        self.restart()

    def restart(self):
        self.steps, shape = 0, self.value.shape
        zeros = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
        zeros = {"variance": shape} if len(shape) == 1 else zeros
        self.state = {name: self.value.new_zeros(size) for name, size in zeros.items()}
        self.shared = {"col_var"} if len(shape) == 2 else set()
        self.begun = torch.zeros(shape[0], dtype=torch.bool)

    def forget(self, frozen):
        rows = frozen.flatten(1).all(1) if frozen.dim() > 1 else frozen
        self.begun &= ~rows
        if rows.all():
            self.restart()

    def step(self, gradient, mask, lr):
        rows = mask.flatten(1).all(1) if mask.dim() > 1 else mask
        part, own = torch.nn.Parameter(self.value[rows]), gradient[rows]
        squares, new = own.square(), ~self.begun[rows]
        means = {"row_var": lambda: squares.mean(-1, True), "col_var": lambda: squares.mean(-2, True)}
        optimizer = self.make([part])
        optimizer.param_groups[0]["lr"] = lr
        state = {name: value if name in self.shared else value[rows] for name, value in self.state.items()}
        for name in state.keys() - self.shared:
            state[name][new] = means.get(name, lambda: squares)()[new]
        optimizer.state[part] = {"step": torch.tensor(float(self.steps)), **state}
        part.grad = own.clone()
        optimizer.step()
        self.value[rows] = part.detach()
        for name, value in self.state.items():
            value[... if name in self.shared else rows] = optimizer.state[part][name]
        self.steps += 1
        self.begun |= rows


def muon(**settings):
    return lambda weights: torch.optim.Muon(weights, lr=0.1, **settings)


def adafactor(**settings):
    return lambda weights: torch.optim.Adafactor(weights, lr=0.1, **settings)


COURSES = {
    "Muon": (muon(), MuonByHand, (6, 5)),
    "Muon wide": (muon(weight_decay=0.3, adjust_lr_fn="match_rms_adamw", nesterov=False), MuonByHand, (4, 9)),
    "Adafactor": (adafactor(), AdafactorByHand, (6, 5)),
    "Adafactor decay": (adafactor(weight_decay=0.2, maximize=True, foreach=False), AdafactorByHand, (6, 5)),
    "Adafactor kernels": (adafactor(d=2.0), AdafactorByHand, (5, 3, 2, 4)),
    "Adafactor vector": (adafactor(), AdafactorByHand, (7,)),
}
"""For each optimizer its reference and a shape."""


# --- random courses


@pytest.mark.supports("submatrix optimizers", "rows", "frozen_state", loop="plain")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", COURSES)
def test_the_active_part_moves_as_under_the_optimizer_alone(name, seed):
    make, by_hand, shape = COURSES[name]

    def draw_mask(generator):
        """A mask of rows, of columns, of the whole tensor, or none."""
        kind = int(torch.randint(5 if by_hand is MuonByHand else 4, (), generator=generator))
        if kind == 0:
            return None
        if kind == 1:
            return torch.tensor(bool(torch.randint(2, (), generator=generator)))
        sizes = shape[-1:] if kind == 4 else (shape[0], *(1,) * (len(shape) - 1))
        mask = torch.rand(sizes, generator=generator) < 0.5
        # As policies that intersect give them: of rows, but with a flag for each entry.
        return mask.expand(shape).clone() if kind == 3 else mask

    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if by_hand is AdafactorByHand else torch.float32
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    follow_course(make, by_hand(make, weight.detach()), weight, draw_mask, generator, 20, 1e-6)


def test_a_part_has_the_settings_of_its_parameter():
    weights = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer = gp.MaskedOptimizer(torch.optim.Muon(weights, lr=0.1, weight_decay=0.0))
    optimizer.set_masks(dict.fromkeys(weights, torch.arange(4).view(4, 1) < 2))
    optimizer.set_settings({weights[1]: {"lr": 0.5}})
    for weight in weights:
        weight.grad = torch.arange(12.0).view(4, 3)
    optimizer.step()
    first, second = (1 - weight.detach() for weight in weights)
    torch.testing.assert_close(second, 0.5 * first)
    assert first[:2].abs().min() > 0


def test_a_step_that_fails_leaves_groups_and_weights_as_they_were():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = gp.MaskedOptimizer(torch.optim.Muon([weight], lr=0.1))
    optimizer.set_mask(weight, torch.arange(4).view(4, 1) < 2)
    weight.grad = torch.ones(4, 3)
    optimizer.param_groups[0]["ns_coefficients"] = (1.0,)
    with pytest.raises(ValueError, match="Coefficients"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [weight]
    assert not any(optimizer.state.values())
    assert torch.equal(weight.detach(), torch.ones(4, 3))


# --- memory


def test_under_drop_only_active_rows_have_state():
    weight = torch.nn.Parameter(torch.randn(640, 256))
    used = []
    for mask in (None, torch.arange(640).view(-1, 1) < 64):
        optimizer = gp.MaskedOptimizer(torch.optim.Muon([weight]), frozen_state="drop")
        optimizer.set_mask(weight, mask)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        used.append(optimizer.state_bytes())
    assert used[1] < 0.12 * used[0]


# --- what cannot be


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
@pytest.mark.parametrize("frozen_state", FROZEN_STATES)
def test_whole_tensors_are_exact_where_rows_are_refused(name, frozen_state):
    starts = [torch.randn(4, 3) for _ in range(2)]
    own, plain = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    make = getattr(pytorch_optimizer, name)
    optimizer, reference = gp.MaskedOptimizer(make(own, lr=0.1), frozen_state), make(plain, lr=0.1)
    for step in range(24):
        frozen = step // 4 % 3
        for place in range(2):
            if step % 4 == 0:
                optimizer.set_mask(own[place], frozen != place)
                if frozen == place and frozen_state != "keep":
                    reference.state.pop(plain[place], None)
            gradient = torch.randn(4, 3)
            own[place].grad = gradient.clone()
            plain[place].grad = None if frozen == place else gradient.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-6)
