import multiprocessing

import pytest
import torch

from gradpolicy import MaskedOptimizer
from tests.optim.alone import run_alone


def test_the_tensors_count_begins_anew_where_its_state_is_removed_while_it_rests(parameter):
    optimizer = MaskedOptimizer(torch.optim.Adam([parameter], lr=0.1), "drop", "tensor")
    for rest in (False, False, True):
        optimizer.set_mask(parameter, torch.tensor(not rest))
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    del optimizer.state[parameter]
    optimizer.set_mask(parameter, None)
    optimizer.step()
    torch.testing.assert_close(before - parameter.detach(), torch.full_like(before, 0.1), rtol=1e-7, atol=0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_updates_as_its_parent_does(monkeypatch):
    """Threads are not inherited: those that the parent has must not be waited for."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    size = (1 << 17) + 3
    parameter, mask = torch.nn.Parameter(torch.randn(size)), torch.rand(size) < 0.5
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1))
    optimizer.set_mask(parameter, mask)

    def step():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return parameter.detach().clone()

    step()
    shared = torch.empty(size).share_memory_()
    child = multiprocessing.get_context("fork").Process(target=lambda: shared.copy_(step()))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(shared, step())


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("changes", [1, 7, 12, 40])
def test_an_entrys_place_decides_nothing(device, frozen_state, changes):
    """Vectors and their remainders give the same bits for the same history."""
    kinds = torch.arange(203) % 5
    parameter = torch.nn.Parameter(torch.randn(5)[kinds])
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1), frozen_state=frozen_state)
    for change in range(changes):
        optimizer.set_mask(parameter, (torch.rand(5) < 0.6)[kinds] if change else kinds < 3)
        parameter.grad = torch.randn(5)[kinds]
        optimizer.step()
    assert all(parameter[kinds == kind].unique().numel() == 1 for kind in range(5))


@pytest.mark.parametrize("form", ["channels_last", "transposed", "strided", "complex", "scalar", "empty"])
def test_any_memory_format(device, form):
    made = {
        "channels_last": lambda: torch.randn(4, 3, 2, 2).double().to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(3, 4).double().t(),
        "strided": lambda: torch.randn(4, 6).double()[:, ::2],
        "complex": lambda: torch.randn(4, 3, dtype=torch.complex128),
        "scalar": lambda: torch.randn(()).double(),
        "empty": lambda: torch.randn(0, 3).double(),
    }
    parameter = torch.nn.Parameter(made[form]())
    start = parameter.detach().clone()
    optimizer = MaskedOptimizer(torch.optim.Adam([parameter], lr=0.1, weight_decay=0.1))
    rows = torch.rand(start.shape[:1] + (1,) * (start.dim() - 1)) < 0.5
    masks = [torch.rand(start.shape) < 0.5, rows, torch.rand(start.shape) < 0.5]
    gradients = [torch.randn_like(start) for _ in masks]
    for gradient, mask in zip(gradients, masks, strict=True):
        optimizer.set_mask(parameter, mask)
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        optimizer.step()
    settings = {"lr": 0.1, "weight_decay": 0.1}
    expected = run_alone(torch.optim.Adam, settings, start.contiguous(), gradients, masks, "keep")
    torch.testing.assert_close(parameter.detach().contiguous(), expected, atol=1e-12, rtol=0)
