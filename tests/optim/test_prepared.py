"""The optimizer inside accelerate's wrappers."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from gradpolicy import MaskedOptimizer
from gradpolicy.optim.prepared import innermost, is_prepared, put_inside


def test_a_masked_optimizer_takes_the_place_of_the_innermost_one() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=1.0)
    prepared = AcceleratedOptimizer(Accelerator(cpu=True).prepare(inner))
    assert is_prepared(prepared)
    assert innermost(prepared) is inner
    masked = MaskedOptimizer(inner)
    put_inside(prepared, masked)
    assert innermost(prepared) is masked
    masked.set_mask(weight, torch.tensor([True, False]))
    weight.grad = torch.ones(2)
    prepared.step()
    assert weight.tolist() == [0.0, 1.0]


def test_other_optimizers_are_left_alone() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    put_inside(inner, MaskedOptimizer(inner))
    assert not is_prepared(inner)
    assert innermost(inner) is inner
