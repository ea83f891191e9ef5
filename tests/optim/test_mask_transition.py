"""What a new mask does to ages and state, for one parameter and for many at once."""

import functools
import itertools
import weakref

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError
from tests.optim.alone import Alone

SHAPES = [(12, 6), (12, 6), (5,), (3, 4, 2), (40000,)]


def made(**options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    parameters.append(
        torch.nn.Parameter(torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    )
    settings = {"frozen_state": "keep", **options}
    return MaskedOptimizer(torch.optim.AdamW(parameters, lr=0.1), **settings), parameters


def masks_of(parameters, round_):
    """Of entries, mostly; now and then of rows, of whole tensors, the same again, or none."""
    masks = [torch.rand(parameter.shape) < 0.5 for parameter in parameters]
    for mask in masks:
        mask.view(-1)[:2] = torch.tensor([True, False])
    if round_ == 3:
        masks[0] = torch.rand(12, 1) < 0.5
    if round_ in (4, 6):
        masks[1], masks[2] = torch.zeros(12, 6, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    if round_ == 5:
        masks[3] = None
    return dict(zip(parameters, masks, strict=True))


def outcome(set_masks, rounds=9, **options):
    optimizer, parameters = made(**options)
    for round_ in range(rounds):
        set_masks(optimizer, masks_of(parameters, round_))
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    known = [
        torch.broadcast_to(look(p), p.shape)
        for look in (optimizer.get_mask, optimizer.age)
        for p in parameters
    ]
    state = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [parameter.detach() for parameter in parameters] + known + state


def one_by_one(optimizer, masks):
    for parameter, mask in masks.items():
        optimizer.set_mask(parameter, mask)


def at_once(optimizer, masks):
    optimizer.set_masks(masks)


@pytest.mark.parametrize("bias_correction", ["entry", "tensor"])
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_masks_set_at_once_are_those_set_one_by_one(frozen_state, bias_correction):
    options = {"frozen_state": frozen_state, "bias_correction": bias_correction}
    for own, other in zip(outcome(at_once, **options), outcome(one_by_one, **options), strict=True):
        assert torch.equal(own, other)


def test_of_seeded_masks_one_is_in_memory_at_a_time():
    alive = []

    class Seeded:
        def materialize(self, shape, device):
            alive.append(sum(reference() is not None for reference in drawn))
            mask = torch.rand(shape) < 0.5
            drawn.append(weakref.ref(mask))
            return mask

    drawn = []
    optimizer, parameters = made()
    optimizer.set_masks({parameter: Seeded() for parameter in parameters})
    # The one before is let go of while the next is drawn.
    assert max(alive) <= 1
    assert not any(reference() is not None for reference in drawn)


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_a_mask_may_lie_in_memory_in_any_way(kernels, frozen_state):
    pattern = torch.rand(64) < 0.5
    for mask in (pattern.repeat_interleave(2)[::2], torch.tensor([True]).expand(64), pattern.flip(0)):
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state=frozen_state)
        optimizer.set_mask(weight, mask)
        weight.grad = torch.ones(64)
        optimizer.step()
        assert torch.equal(weight.detach() != 0, mask)


def test_options_hold_for_all_of_them():
    optimizer, parameters = made()
    optimizer.set_masks(masks_of(parameters, 0), frozen_state="drop", bias_correction="tensor")
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    counts = [int(optimizer.get_mask(parameter).sum()) for parameter in parameters]
    assert [optimizer.state[parameter]["exp_avg"].numel() for parameter in parameters] == counts


def test_masks_before_a_wrong_one_are_set():
    optimizer, parameters = made()
    masks = masks_of(parameters, 0)
    masks[parameters[2]] = torch.ones(7, dtype=torch.bool)
    with pytest.raises(PolicyError, match="does not broadcast"):
        optimizer.set_masks(masks)
    assert all(torch.equal(optimizer.get_mask(p), masks[p]) for p in parameters[:2])
    assert optimizer.get_mask(parameters[3]).all()


MASKS = {
    "entries": torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0]]) > 0,
    "others": torch.tensor([[0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 0]]) > 0,
    "rows": torch.tensor([[1], [0], [0], [1]]) > 0,
    "none frozen": None,
    "all frozen": torch.tensor(False),
}


@pytest.mark.parametrize("orders", [*itertools.product(MASKS, MASKS)], ids="-".join)
@pytest.mark.parametrize(
    "frozen_states", [*itertools.product(["keep", "zero", "drop"], repeat=2)], ids="-".join
)
def test_every_frozen_state_may_follow_every_other(kernels, frozen_states, orders):
    start, steps = torch.randn(4, 3, dtype=torch.float64), 2
    weight = torch.nn.Parameter(start.clone())
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1))
    reference = Alone(functools.partial(torch.optim.AdamW, lr=0.1), [start])
    masks = [torch.tensor(True), *(MASKS[order] for order in orders), MASKS["entries"]]
    for mask, frozen_state in zip(masks, ["keep", *frozen_states, frozen_states[0]], strict=True):
        optimizer.set_mask(weight, mask, frozen_state=frozen_state)
        flags = torch.tensor(True) if mask is None else mask
        if frozen_state != "keep":
            reference.forget(0, ~flags.expand(start.shape))
        for _ in range(steps):
            gradient = torch.randn_like(start)
            weight.grad = gradient.clone()
            optimizer.step()
            reference.step([gradient], [flags.expand(start.shape)])
        torch.testing.assert_close(weight.detach().view(-1), reference.value(0), atol=1e-12, rtol=1e-12)
