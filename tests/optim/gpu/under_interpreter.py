"""The Triton kernels beside torch, run by Triton's interpreter on CPU tensors.

The interpreter is chosen before Triton is imported, so test_kernels.py runs this file in its own process.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradpolicy import MaskedOptimizer
from gradpolicy.machinery import launching
from gradpolicy.optim import adam, cohorts, moves, packed
from gradpolicy.optim.gpu import adam as gpu_adam
from gradpolicy.optim.gpu import moves as gpu_moves
from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held
from gradpolicy.optim.record import Numbers
from tests.optim.alone import run_alone

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts float32 off where a GPU rounds it to bfloat16.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 1e-3}
SIZE = 2500


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Tensors of a CPU go to the Triton kernels, and nothing else does their work."""
    monkeypatch.setattr(launching, "DEVICES", {"cpu"})
    for machinery in (native, jitted):
        monkeypatch.setattr(machinery, "library", lambda: None, raising=False)
    torch.manual_seed(0)


def settings(**other):
    given = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "decoupled": True}
    return adam.Settings(**{**given, "amsgrad": False, "maximize": False, **other})


def codes_of(active, slots):
    numbers = torch.randint(0, slots, active.shape)
    return torch.where(active, numbers - 128, numbers).to(torch.int8)


def make_job(dtype, rows, block, own, ages=(4,), density=0.5):
    """A job with random values; what is frozen has gradients that are no numbers."""
    active = torch.rand(rows) < density
    vectors = [torch.randn(rows * block).to(dtype) for _ in range(4 + own.amsgrad)]
    parameter, gradient, first, *squares = vectors
    parameter[::7] = -0.0
    frozen = ~active.repeat_interleave(block)
    gradient[frozen] = torch.tensor([float("nan"), float("inf")], dtype=dtype)[
        torch.arange(int(frozen.sum())) % 2
    ]
    listed = active.nonzero().view(-1) if block > 1 else None
    moments = [first, *(square.abs() for square in squares)]
    codes = codes_of(active, len(ages))
    return adam.Job(parameter, gradient, moments, codes, block, ages, own, None, len(ages), listed, density)


def packed_job(job):
    """The same with memory for active entries alone."""
    held = Held(job.codes, job.block)
    moments = [held.pack(moment) for moment in job.moments]
    codes = held.pack(job.codes, 1)
    rest = (job.block, job.ages, job.settings, held, job.slots, held.rows, job.density)
    return adam.Job(job.parameter.clone(), job.gradient, moments, codes, *rest)


def run(jobs):
    records = []
    for job in jobs:
        assert gpu_adam.takes(job)
        records.append((gpu_adam.Record(job), len(records)))
    return gpu_adam.Batch(records).run([Numbers.of(job.settings, job.ages) for job in jobs])


def copy_of(job):
    vectors = [job.parameter.clone(), job.gradient, [moment.clone() for moment in job.moments]]
    return adam.Job(*vectors, job.codes, job.block, job.ages, job.settings, job.held, job.slots, job.rows)


def expected_of(job):
    """The parameter and the moments as torch operations make them."""
    after = copy_of(job)
    adam.run(after, adam.dense_in_chunks)
    return after


def assert_same(job, before, after):
    tolerance = TOLERANCE[job.parameter.dtype]
    frozen = ~(job.codes < 0).repeat_interleave(job.block)
    for got, old, wanted in zip(
        [job.parameter, *job.moments],
        [before.parameter, *before.moments],
        [after.parameter, *after.moments],
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        assert torch.equal(got.view(whole)[frozen], old.view(whole)[frozen])
        assert not torch.equal(got, old)


EVERYTHING = {"amsgrad": True, "decoupled": False, "maximize": True, "scale": 8.0}


@pytest.mark.parametrize(
    ("dtype", "own", "ages"),
    [
        (torch.float64, {}, (0, 3, 900)),
        (torch.float64, EVERYTHING, (4,)),
        (torch.float32, EVERYTHING, (0, 3, 900)),
        (torch.bfloat16, EVERYTHING, (0, 3, 900)),
        (torch.float16, {}, (4,)),
    ],
)
@pytest.mark.parametrize(
    ("rows", "block", "density"), [(SIZE, 1, 0.5), (SIZE, 1, 0.05), (30, 80, 0.5), (3, 1500, 0.7)]
)
def test_updates_are_those_of_torch(dtype, rows, block, density, own, ages):
    job = make_job(dtype, rows, block, settings(**own), ages, density)
    before, after = copy_of(job), expected_of(job)
    assert run([job]) == []
    assert_same(job, before, after)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "block"), [(SIZE, 1), (30, 80), (70, 3)])
def test_updates_of_held_entries_are_those_of_all(dtype, rows, block):
    job = make_job(dtype, rows, block, settings(amsgrad=True), (0, 3, 900), 0.3)
    own = packed_job(job)
    after = expected_of(job)
    assert run([own]) == []
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(own.parameter, after.parameter, rtol=tolerance, atol=tolerance)
    for packed_moment, moment in zip(own.moments, after.moments, strict=True):
        torch.testing.assert_close(packed_moment, own.held.pack(moment), rtol=tolerance, atol=tolerance)


def test_many_tensors_are_updated_together(monkeypatch):
    launches = []
    run_kernel = launching.Launcher.__call__

    def noted(launcher, *given):
        launches.append(launcher._kernel.__name__)
        return run_kernel(launcher, *given)

    monkeypatch.setattr(launching.Launcher, "__call__", noted)
    rates, sizes = (0.1, 0.02, 0.3), (5, 1024, 1500, 2048, 3000)
    jobs = [
        make_job(torch.float32, size, 1, settings(lr=lr), (2, 7))
        for size, lr in zip(sizes, itertools.cycle(rates))
    ] + [make_job(torch.float32, rows, 12, settings(lr=0.2)) for rows in (3, 90)]
    befores, afters = [copy_of(job) for job in jobs], [expected_of(job) for job in jobs]
    assert run(jobs) == []
    for job, before, after in zip(jobs, befores, afters, strict=True):
        assert_same(job, before, after)
    assert launches == ["adam_entries", "adam_rows"]


def test_what_was_compiled_for_many_groups_serves_fewer():
    for groups in (16, 9):  # where corrections begin is a multiple of 16 for one of them
        jobs = [make_job(torch.float32, 60, 1, settings(lr=0.1 + index), (2, 7)) for index in range(groups)]
        befores, afters = [copy_of(job) for job in jobs], [expected_of(job) for job in jobs]
        assert run(jobs) == []
        for job, before, after in zip(jobs, befores, afters, strict=True):
            assert_same(job, before, after)


def test_a_tensor_that_begins_anywhere_is_updated():
    job = make_job(torch.float32, SIZE, 1, settings())
    room = torch.zeros(SIZE + 1)
    job.parameter = room[1:].copy_(job.parameter)
    before, after = copy_of(job), expected_of(job)
    assert run([job]) == []
    assert_same(job, before, after)
    assert room[0] == 0


@pytest.mark.parametrize("wide", [torch.int8, torch.int16])
@pytest.mark.parametrize("size", [2, 5000])
def test_codes_are_looked_up_as_torch_does(size, wide):
    codes, flags = codes_of(torch.rand(size) < 0.5, 3), torch.rand(size) < 0.5
    table = torch.randint(-128, 128, (2, 2, 3)).to(wide)
    expected = cohorts.recode(codes, flags, table)
    result = gpu_moves.recode(codes, flags, table)
    assert torch.equal(result, expected)
    assert result.dtype is wide


@pytest.mark.parametrize("first", [0, 1])
def test_many_codes_are_looked_up_as_each_alone(first):
    sizes = (2, 5000, 4096, 9, 3)
    old = [codes_of(torch.rand(size + first) < 0.5, 3)[first:] for size in sizes]
    flags = [torch.rand(size + first)[first:] < 0.5 for size in sizes]
    flags[3] = old[3] < 0
    table = torch.randint(-128, 128, (2, 2, 3)).to(torch.int8)
    expected = [cohorts.recode(*member, table) for member in zip(old, flags, strict=True)]
    members = list(zip(old, flags, strict=True))
    seen = [(int(own.sum()), not torch.equal(own, codes < 0)) for codes, own in members]
    assert gpu_moves.survey_many(members) == seen
    assert gpu_moves.recode_many(members, table)
    assert all(map(torch.equal, old, expected))


@pytest.mark.parametrize("of_codes", [True, False])
@pytest.mark.parametrize("size", [1, 8, 1024, 5000])
def test_bits_are_those_of_torch(size, of_codes):
    flags = torch.rand(size) < 0.5
    bits, offsets, _ = gpu_moves.index(codes_of(flags, 3) if of_codes else flags)
    assert torch.equal(bits, packed._index(flags)[0])
    assert torch.equal(offsets.diff(), torch.stack([part.sum() for part in flags.split(gpu_moves.tile())]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 1024, 5000])
def test_values_are_moved_between_sets_of_held_entries(size, dtype):
    values = torch.randint(1, 100, (size,)).to(dtype)
    before, after = torch.rand(size) < 0.4, torch.rand(size) < 0.6
    old, new = Held(before, 1), Held(after, 1)
    packed_values = old.pack(values)
    newcomer = -77 if dtype is torch.int8 else 0
    assert old.grain == gpu_moves.tile()
    assert torch.equal(packed_values, values[before])
    assert torch.equal(old.unpack(packed_values), values.masked_fill(~before, 0))
    moved = old.move(packed_values, new, newcomer)
    assert torch.equal(moved, values.masked_fill(~before, newcomer)[after])
    assert torch.equal(old.flags(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "block"), [(5000, 1), (40, 33)])
@pytest.mark.parametrize("of_codes", [True, False])
def test_frozen_entries_are_emptied(rows, block, dtype, of_codes):
    active = torch.rand(rows) < 0.5
    flat = torch.full((rows * block,), float("nan"), dtype=dtype)
    moves.fill_frozen(flat, codes_of(active, 2) if of_codes else active, block, 0.0)
    assert torch.equal(flat.isnan(), active.repeat_interleave(block))
    assert torch.equal(flat == 0, ~active.repeat_interleave(block))


def test_many_tensors_are_emptied_at_once(monkeypatch):
    launches = []
    launch = launching.launch
    monkeypatch.setattr(
        launching, "launch", lambda *given, **more: launches.append(1) or launch(*given, **more)
    )
    vectors, expected = [], []
    for size, block in ((5000, 1), (7, 1), (1024, 1), (33, 40), (3, 5)):
        for form in ("codes", "flags", "held", "wide"):
            active = torch.rand(size) < 0.5
            codes = codes_of(active, 2)
            forms = {"codes": codes, "flags": active, "wide": codes.short()}
            given = Held(active, block) if form == "held" else forms[form]
            vectors.append((torch.randn(size * block), given, block))
            expected.append(vectors[-1][0].where(active.repeat_interleave(block), 0.0))
    launches.clear()
    moves.clear_frozen(vectors)
    for (flat, *_), wanted in zip(vectors, expected, strict=True):
        assert torch.equal(flat, wanted)
    # Codes, flags and wide codes of entries and of rows, and bits.
    assert len(launches) == 7


@pytest.mark.parametrize("size", [1, 4096, 9000])
def test_a_survey_counts_and_compares(size):
    flags, other = torch.rand(size) < 0.5, torch.rand(size) < 0.5
    for known in (codes_of(other, 3), Held(other, 1)):
        codes, held = (known, None) if isinstance(known, torch.Tensor) else (torch.zeros(1), known)
        seen = moves.survey(flags, codes, held)
        assert seen.count == flags.sum()
        assert seen.same is torch.equal(flags, other)
        assert moves.survey(other, codes, held).same is True


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_each_entry_moves_as_alone(monkeypatch, frozen_state):
    monkeypatch.setattr(adam, "run", None)
    shapes = [(4, 3), (4, 3), (4, 1), (1, 1), (4, 3), (1, 3), (4, 3)]
    masks = [mask for shape in shapes for mask in [torch.rand(shape) < 0.6] * 2]
    start = torch.randn(4, 3, dtype=torch.float64)
    gradients = [torch.randn(4, 3, dtype=torch.float64) for _ in masks]
    parameter, option = torch.nn.Parameter(start.clone()), {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], **option), frozen_state=frozen_state)
    for gradient, mask in zip(gradients, masks, strict=True):
        optimizer.set_mask(parameter, mask)
        parameter.grad = gradient.masked_fill(~mask.expand(4, 3), float("nan"))
        version = parameter._version
        optimizer.step()
        assert not mask.any() or parameter._version > version
    expected = run_alone(torch.optim.AdamW, option, start, gradients, masks, frozen_state)
    torch.testing.assert_close(parameter.detach(), expected, atol=1e-12, rtol=0)


class Asked(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("frozen_state", "shape"), [("keep", (40, 1)), ("zero", (40, 30)), ("drop", (40, 30)), ("drop", (40, 1))]
)
def test_a_step_does_not_wait_for_the_device(frozen_state, shape):
    parameters = [torch.nn.Parameter(torch.randn(40, 30)) for _ in range(2)]
    optimizer = MaskedOptimizer(torch.optim.AdamW(parameters, fused=True), frozen_state=frozen_state)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(40, 30)
            optimizer.set_mask(parameter, torch.rand(shape) < 0.5)
        optimizer.step()
    with Asked() as asked:
        optimizer.step()
    # What gives a number, or a shape that depends on values, waits.
    assert not {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"} & set(asked.names)
    assert len(asked.names) < 40


def waits_of(monkeypatch, *names):
    """Grows at each call of the functions that wait for the device."""
    waits = []
    for name in names:
        look = getattr(gpu_moves, name)
        monkeypatch.setattr(gpu_moves, name, lambda *given, look=look: waits.append(1) or look(*given))
    return waits


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_a_change_of_an_entry_mask_waits_once(monkeypatch, frozen_state):
    waits = waits_of(monkeypatch, "survey", "index_many")
    parameter = torch.nn.Parameter(torch.randn(40, 30))
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], fused=True), frozen_state=frozen_state)
    parameter.grad = torch.randn(40, 30)
    for change in range(4):
        waits.clear()
        mask = torch.rand(40, 30) < 0.5
        with Asked() as asked:
            optimizer.set_mask(parameter, mask)
        assert waits == [1]
        # Before the first there is one code for all.
        assert change == 0 or not {"_local_scalar_dense", "nonzero", "equal", "item"} & set(asked.names)
        optimizer.step()


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_changes_of_many_entry_masks_wait_once(monkeypatch, frozen_state):
    waits = waits_of(monkeypatch, "survey_many", "index_many")
    parameters = [torch.nn.Parameter(torch.randn(40, 30)) for _ in range(3)]
    optimizer = MaskedOptimizer(torch.optim.AdamW(parameters, fused=True), frozen_state=frozen_state)
    for parameter in parameters:
        parameter.grad = torch.randn(40, 30)
        optimizer.set_mask(parameter, torch.rand(40, 30) < 0.5)
    monkeypatch.setattr(gpu_moves, "survey", lambda *given, **more: pytest.fail("one by one"))
    for _ in range(2):
        masks = {parameter: torch.rand(40, 30) < 0.5 for parameter in parameters}
        waits.clear()
        with Asked() as asked:
            optimizer.set_masks(masks)
        assert waits == [1]
        assert not {"_local_scalar_dense", "nonzero", "equal", "item"} & set(asked.names)
        assert all(torch.equal(optimizer.get_mask(parameter), mask) for parameter, mask in masks.items())
        optimizer.step()
