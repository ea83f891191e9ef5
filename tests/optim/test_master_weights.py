import copy
import io
import warnings

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.optim.update_rules.master_weights import joined, split

KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-5),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-5),
}
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def gradient_from(generator):
    """Return a gradient that each of the dtypes holds without rounding."""
    return torch.randn(48, 20, generator=generator).mul(0.01).bfloat16().half()


class Course:
    """A parameter of 16 bits that starts at rounded float32 values, and its optimizer."""

    def __init__(self, kind, dtype, **options):
        generator = torch.Generator().manual_seed(0)
        self.start = torch.randn(48, 20, generator=generator).mul(0.05).to(torch.bfloat16).float()
        # No start that float16 keeps to a multiple of 2^-40 only.
        self.start[self.start.abs() < 1e-3] = 0.0625
        self.mask = torch.rand(48, 20, generator=generator) < 0.4
        self.parameter = torch.nn.Parameter(self.start.to(dtype))
        self.make = lambda: gp.MaskedOptimizer(KINDS[kind]([self.parameter]), **options)
        self.optimizer = self.make()
        self.optimizer.set_mask(self.parameter, self.mask)
        self.gradients = torch.Generator().manual_seed(1)

    def steps(self, count, changes=0):
        for step in range(count):
            if changes and step % changes == 0:
                self.optimizer.set_mask(self.parameter, torch.rand(48, 20, generator=self.gradients) < 0.5)
            gradient = gradient_from(self.gradients)
            self.parameter.grad = gradient.to(self.parameter.dtype)
            self.optimizer.step()
        return self.parameter.detach()


@pytest.mark.supports("master weights", loop="plain")
@BOTH
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_400_steps_of_small_rates_are_those_of_float32(kind, frozen_state, dtype):
    options = {"frozen_state": frozen_state}
    changes = 0 if frozen_state == "drop" else 7
    full = Course(kind, torch.float32, **options)
    half = Course(kind, dtype, **options, master_weights=True)
    expected = split(full.steps(400, changes), dtype)[0].to(dtype)
    assert torch.equal(half.steps(400, changes), expected)
    assert (expected != half.start.to(dtype))[half.optimizer.age(half.parameter).expand(48, 20) > 0].any()


@pytest.mark.parametrize("frozen_state", ["keep", "zero"])
def test_a_tensor_that_is_frozen_for_a_while_keeps_its_full_numbers(frozen_state):
    full = Course("adamw", torch.float32, frozen_state=frozen_state)
    half = Course("adamw", torch.bfloat16, frozen_state=frozen_state, master_weights=True)
    for active in (True, False, True):
        for course in (full, half):
            course.optimizer.set_mask(course.parameter, active)
            course.steps(50)
    assert torch.equal(half.steps(0), split(full.steps(0), torch.bfloat16)[0].bfloat16())


@BOTH
def test_follows_torch_on_each_entry_alone(dtype):
    course = Course("adamw", dtype, frozen_state="drop", master_weights=True)
    alone = torch.nn.Parameter(course.start[course.mask])
    reference = torch.optim.AdamW([alone], lr=1e-5)
    gradients = torch.Generator().manual_seed(1)
    for _ in range(100):
        alone.grad = gradient_from(gradients).float()[course.mask]
        reference.step()
    result = course.steps(100)
    assert torch.equal(result[~course.mask].float(), course.start[~course.mask])
    torch.testing.assert_close(result[course.mask].float(), alone.detach(), rtol=2.0**-8, atol=0)
    assert (result[course.mask] == alone.detach().to(dtype)).float().mean() > 0.99


def test_without_them_most_updates_are_lost():
    course = Course("adamw", torch.bfloat16)
    assert (course.steps(100)[course.mask] != course.start.bfloat16()[course.mask]).float().mean() < 0.1


@pytest.mark.parametrize("way", ["compact", "dense", "plain first"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam"])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_resumes_with_the_same_bits(frozen_state, kind, way):
    options = {"frozen_state": frozen_state, "master_weights": True}
    expected = Course(kind, torch.bfloat16, **options).steps(100)
    course = Course(kind, torch.bfloat16, **options)
    course.steps(50)
    file = io.BytesIO()
    torch.save(course.optimizer.state_dict(dense=way == "dense"), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    if way == "plain first":  # as the Hugging Face Trainer loads it, and torch casts it
        plain = KINDS[kind]([course.parameter])
        plain.load_state_dict(saved)
        saved = plain.state_dict()
    course.optimizer = course.make()
    course.optimizer.load_state_dict(saved)
    assert torch.equal(course.steps(50), expected)


def test_what_a_plain_optimizer_has_rounded_is_refused():
    course = Course("adamw", torch.bfloat16, master_weights=True)
    course.steps(5)
    plain = KINDS["adamw"]([course.parameter])
    plain.load_state_dict(course.optimizer.state_dict(dense=True))
    with pytest.raises(gp.PolicyError, match="saved with master_weights=True, and torch rounds"):
        course.make().load_state_dict(plain.state_dict())


def test_begins_and_loads_what_was_saved_without():
    course = Course("adamw", torch.bfloat16, frozen_state="drop")
    course.steps(5)
    saved = course.optimizer.state_dict()
    course.optimizer = gp.MaskedOptimizer(KINDS["adamw"]([course.parameter]), master_weights=True)
    course.optimizer.load_state_dict(saved)
    before = course.parameter.detach().clone()
    course.optimizer.set_mask(course.parameter, course.mask, frozen_state="drop")
    moved = course.steps(100) != before
    assert moved[course.mask].float().mean() > 0.1
    assert not moved[~course.mask].any()
    assert course.optimizer.state[course.parameter]["exp_avg"].dtype == torch.float32


def test_two_bytes_for_each_active_entry():
    plain = Course("sgd", torch.float32, frozen_state="drop")
    course = Course("sgd", torch.bfloat16, frozen_state="drop", master_weights=True)
    for each in (plain, course):
        each.steps(1)
    extra = course.optimizer.state_bytes() - plain.optimizer.state_bytes()
    assert extra == 2 * int(course.mask.sum())


@BOTH
def test_splits_every_number_into_the_nearest_weight_and_a_rest(dtype):
    numbers = torch.arange(-(2**31), 2**31, 8191).int().view(torch.float32)
    most = 3e38 if dtype == torch.bfloat16 else 6e4
    finite = numbers[numbers.abs() < most]
    weight, rest = split(finite, dtype)
    assert torch.equal(weight.to(dtype).float(), weight)
    assert ((weight - finite).abs() <= (finite.to(dtype).float() - finite).abs()).all()
    assert (rest >= -0x8000).all()
    assert (rest <= 0x7FFF).all()
    back = joined(weight, rest.float(), dtype)
    exact = torch.ones_like(finite, dtype=torch.bool) if dtype == torch.bfloat16 else finite.abs() > 2.0**-16
    assert torch.equal(back[exact], finite[exact])
    assert ((back - finite).abs() <= 2.0**-40).all()
    assert split(numbers[numbers.isnan()], dtype)[0].isnan().all()


@BOTH
def test_weights_that_something_else_sets_to_zero_stay_finite(dtype):
    course = Course("adamw", dtype, master_weights=True)
    course.steps(20)
    with torch.no_grad():
        course.parameter.zero_()
    assert course.steps(3).isfinite().all()


def test_says_where_they_cannot_be_kept():
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(gp.PolicyError, match="master_weights=True expects an optimizer with an update rule"):
        gp.MaskedOptimizer(torch.optim.Rprop([parameter]), master_weights=True)
    with pytest.raises(gp.PolicyError, match=r"master_weights: expected True or False, got 'yes'"):
        gp.MaskedOptimizer(torch.optim.AdamW([parameter]), master_weights="yes")
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW([parameter]), master_weights=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(gp.PolicyError, match="does not know master_weights"):
        optimizer.inner.step()


def test_float32_parameters_need_none():
    course = Course("adamw", torch.float32, master_weights=True)
    assert torch.equal(course.steps(20), Course("adamw", torch.float32).steps(20))
    assert not any(name.startswith("master") for name in course.optimizer.state[course.parameter])


@pytest.mark.supports("master weights", loop="plain", compiled=True)
@pytest.mark.slow
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_compiled_code_gives_the_same_bits(frozen_state):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1100, 1000, generator=generator).mul(0.05).bfloat16()
    mask = torch.rand(1100, 1000, generator=generator) < 0.3
    half, full = (torch.nn.Parameter(start.to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    for parameter in (half, full):
        made = KINDS["adamw"]([parameter])
        optimizer = gp.MaskedOptimizer(made, frozen_state=frozen_state, master_weights=True)
        optimizer.set_mask(parameter, mask)
        for seed in range(20):
            generator.manual_seed(seed)
            gradient = torch.randn(1100, 1000, generator=generator).mul(0.01).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    assert torch.equal(half.detach(), split(full.detach(), torch.bfloat16)[0].bfloat16())


@pytest.mark.slow
def test_the_fixed_entries_of_peft_move_as_in_float32():
    """SHiRA: 400 steps of `peft` on float32 weights, and of its entries on bfloat16 weights."""
    import peft

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16)).bfloat16().float()
    config = peft.ShiraConfig(r=4, target_modules=["0", "2"], random_seed=0)
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    masks, teacher, x = {}, copy.deepcopy(base), torch.randn(256, 64).bfloat16().float()
    for name in ("0.weight", "2.weight"):
        layer = adapted.base_model.model.get_submodule(name[0])
        masks[name] = torch.zeros(layer.weight.shape, dtype=torch.bool)
        masks[name][tuple(layer.shira_indices["default"].long())] = True
        teacher.get_parameter(name).data += masks[name] * torch.randn(layer.weight.shape) * 0.05
    target = teacher(x).detach()

    def loss(model):
        return (model(x.to(next(model.parameters()).dtype)).float() - target).square().mean()

    def steps(model, optimizer):
        for _ in range(400):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    def adamw(model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)

    def gained(model):
        return (loss(base) - loss(model.float())).item()

    steps(adapted, adamw(adapted))
    expected = adapted.merge_and_unload()
    kept, lost = (copy.deepcopy(base).bfloat16() for _ in range(2))
    for model in (kept, lost):
        policy = gp.Train(masks, params=list(masks), frozen_state="drop", master_weights=model is kept)
        with (
            warnings.catch_warnings(action="ignore"),
            gp.training(model, adamw(model), [policy]) as optimizer,
        ):
            steps(model, optimizer)
    for name, mask in masks.items():
        moved, rounded = kept.get_parameter(name), expected.get_parameter(name).bfloat16()
        assert torch.equal(moved[~mask].float(), base.get_parameter(name)[~mask])
        # The gradients of a forward pass in bfloat16 differ a little.
        assert (moved[mask] == rounded[mask]).float().mean() > 0.9
    assert gained(kept) == pytest.approx(gained(expected), rel=0.01)
    assert gained(lost) < 0.05 * gained(expected)
