"""What must hold on a real GPU, beside test_adam.py; test_kernels.py checks the same kernels without one."""

import warnings

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError
from gradpolicy.machinery import launching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STATES = ["keep", "zero", "drop"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def no_fallback(recwarn):
    """The kernels do the work: falling back is said."""
    yield
    assert not [warning for warning in recwarn if "gradpolicy" in str(warning.message)]
    assert launching.serve(torch.zeros(1, device="cuda"))


def moved(device, dtype, frozen_state, shapes, **options):
    """A weight after steps under changing masks, with gradients that are no numbers where it is frozen."""
    torch.manual_seed(0)
    shape = (96, 160)
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype).to(device))
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.01, **options), frozen_state=frozen_state)
    for coarse in shapes:
        mask = torch.rand(coarse) < 0.4
        optimizer.set_mask(parameter, mask.to(device))
        for _ in range(2):
            gradient = torch.randn(shape, dtype=torch.float64).to(dtype).masked_fill(~mask, float("nan"))
            parameter.grad = gradient.to(device)
            frozen = ~mask.expand(shape).to(device)
            before = parameter.detach().clone()
            optimizer.step()
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(parameter.detach().view(whole)[frozen], before.view(whole)[frozen])
    return parameter.detach().cpu(), optimizer.age(parameter).cpu(), optimizer


@pytest.mark.parametrize("frozen_state", STATES)
@pytest.mark.parametrize(
    "shapes", [[(96, 160)] * 5, [(96, 1)] * 3, [(96, 160), (96, 1), (1, 1), (96, 160), (1, 160)]]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_gpu_does_what_a_cpu_does(dtype, shapes, frozen_state):
    options = {"weight_decay": 0.1, "amsgrad": True, "eps": 1e-3}
    here, ages, _ = moved("cuda", dtype, frozen_state, shapes, **options)
    there, expected_ages, _ = moved("cpu", dtype, frozen_state, shapes, **options)
    torch.testing.assert_close(here, there, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(ages.expand(96, 160), expected_ages.expand(96, 160))


def test_dropped_moments_hold_no_memory():
    *_, optimizer = moved("cuda", torch.float32, "drop", [(96, 160)] * 3)
    parameter = optimizer.param_groups[0]["params"][0]
    count = int(optimizer.get_mask(parameter).sum())
    assert optimizer.state[parameter]["exp_avg"].numel() == count
    # Two moments and a code each, a bit an entry, and a count every 1024 entries.
    assert optimizer.state_bytes() <= 9 * count + 96 * 160 * (1 / 8 + 8 / 1024) + 64


@pytest.mark.parametrize("frozen_state", STATES)
@pytest.mark.parametrize("shape", [(96, 160), (96, 1)])
def test_a_step_does_not_wait_for_the_gpu(shape, frozen_state):
    *_, optimizer = moved("cuda", torch.float32, frozen_state, [shape] * 3, fused=True)
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.effective_steps == 8


@pytest.mark.parametrize("frozen_state", STATES)
def test_a_change_of_an_entry_mask_waits_once(frozen_state):
    *_, optimizer = moved("cuda", torch.float32, frozen_state, [(96, 160)] * 3, fused=True)
    mask = torch.rand(96, 160, device="cuda") < 0.4
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            optimizer.set_mask(optimizer.param_groups[0]["params"][0], mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in said if "synchroniz" in str(warning.message)]) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_of_a_grad_scaler_changes_nothing(fused):
    parameter = torch.nn.Parameter(torch.randn(64, 32, device="cuda"))
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1, fused=fused), frozen_state="zero")
    optimizer.set_mask(parameter, torch.rand(64, 32, device="cuda") < 0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    wanted = torch.nn.Parameter(parameter.detach().clone())
    plain = MaskedOptimizer(torch.optim.AdamW([wanted], lr=0.1, fused=fused), frozen_state="zero")
    plain.set_mask(wanted, optimizer.get_mask(parameter))
    for factor in (1.0, float("inf"), 2.0):
        scaler.scale(torch.ones((), device="cuda"))
        gradient = torch.randn(64, 32, device="cuda")
        parameter.grad = gradient * scaler.get_scale() * factor
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if factor == float("inf"):
            assert torch.equal(parameter, before)
        else:
            wanted.grad = gradient * factor
            plain.step()
    assert optimizer.effective_steps == 2
    torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


def test_a_masked_step_refuses_to_be_recorded():
    *_, optimizer = moved("cuda", torch.float32, "keep", [(96, 160)] * 2, capturable=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PolicyError, match="cannot be recorded in a CUDA graph"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("frozen_state", STATES)
def test_masks_that_were_set_on_a_cpu_come_along(kind, frozen_state):
    model = torch.nn.Linear(40, 30)
    optimizer = MaskedOptimizer(kind(model.parameters(), lr=0.1), frozen_state=frozen_state)
    mask = torch.rand(30, 40) < 0.5
    optimizer.set_mask(model.weight, mask)
    model.cuda()
    before = model.weight.detach().clone()
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.mask_gradients()
        optimizer.step()
    assert torch.equal(model.weight.detach() != before, mask.cuda())
    assert torch.equal(optimizer.get_mask(model.weight), mask.cuda())
