"""The C kernels and torch do the same, operation by operation."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.compiling import compiler
from gradpolicy.optim.kernels import EntryUpdate, native, reference
from gradpolicy.optim.kernels.native import NATIVE, supports
from gradpolicy.optim.kernels.reference import REFERENCE
from gradpolicy.optim.update_rules.adam import Adam
from gradpolicy.tensors.packed_mask import pack_bits, unpack

pytestmark = pytest.mark.skipif(not compiler(), reason="needs a C compiler")
SIZES = [1, 63, 64, 65, 5000, 70001]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert supports([torch.float32], "adam")


def ages_of(blocks, dtype=torch.int16, most=40):
    return ((torch.rand(blocks) < 0.5) * 2 - 1).to(dtype) * torch.randint(1, most, (blocks,), dtype=dtype)


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_a_new_mask_turns_the_signs_of_ages(blocks, forget, dtype):
    before, flags = ages_of(blocks, dtype), torch.rand(blocks) < 0.5
    expected = []
    for age, flag in zip(before.tolist(), flags.tolist(), strict=True):
        size = age + 3 if age > 0 else -age
        expected.append(size if flag else -1 if forget else -size)
    for kernels in (NATIVE, REFERENCE):
        ages = before.clone()
        kernels.turn(ages, 3, flags, forget)
        assert ages.tolist() == expected


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int16])
def test_values_are_repacked_from_one_index_to_another(blocks, dtype):
    for block, *shares in itertools.product((1, 3), (None, 0.1, 0.9), (None, 0.0, 0.5)):
        source, target = (torch.rand(blocks) < (2 if each is None else each) for each in shares)
        values = (torch.randn(blocks, block) * 100).to(dtype)
        expected = torch.where(source.unsqueeze(1), values, 7)[target]
        for kernels, form in itertools.product((NATIVE, REFERENCE), (pack_bits, positions)):
            pairs = zip(shares, (source, target), strict=True)
            indices = [None if share is None else form(flags) for share, flags in pairs]
            repacked = kernels.repack(values[source], *indices, block, blocks, 7)
            assert torch.equal(repacked, expected.view(-1)), (block, shares)


@pytest.mark.parametrize("blocks", SIZES)
def test_an_index_is_padded_to_whole_words(blocks):
    flags = torch.rand(blocks) < 0.5
    index = pack_bits(flags)
    assert index.numel() == -(-blocks // 64) * 8
    bits = (index.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    assert torch.equal(bits.view(-1)[:blocks].bool(), flags)
    assert not bits.view(-1)[blocks:].any()


def test_every_byte_but_0_is_a_flag_that_is_set():
    flags = torch.tensor([0, 1, 2, 128, 255, 0, 7, 1] * 9, dtype=torch.uint8)
    assert torch.equal(pack_bits(flags.view(torch.bool)), pack_bits(flags != 0))


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_blocks_become_a_number_or_what_another_tensor_has(blocks, block, dtype):
    ages = ages_of(blocks)
    values, other = (torch.randn(blocks * block).to(dtype) for _ in range(2))
    values[0] = torch.nan
    frozen = (ages < 0).repeat_interleave(block)
    for kernels, fill in itertools.product((NATIVE, REFERENCE), (0.0, 0.3, other)):
        expected = torch.where(frozen, fill if fill is other else torch.tensor(fill, dtype=dtype), values)
        for own_ages, index in ((ages, None), (None, pack_bits(ages > 0)), (None, positions(ages > 0))):
            filled = values.clone()
            kernels.fill_frozen(filled, own_ages, index, block, fill)
            torch.testing.assert_close(filled, expected, rtol=0, atol=0, equal_nan=True)


def positions(flags):
    return flags.nonzero().view(-1).int()


def adam_update(blocks, block, dtype, packed, shared, ages_dtype=torch.int16):
    ages = ages_of(blocks, ages_dtype)
    active = ages > 0
    shape = (blocks * block,)
    parameter, gradient = (torch.randn(shape).to(dtype) for _ in range(2))
    state = {"exp_avg": torch.randn(shape).to(dtype), "exp_avg_sq": torch.rand(shape).to(dtype)}
    index = None
    if packed:
        index = pack_bits(active)
        packing = None, index, block, blocks, 0.0
        state = {name: REFERENCE.repack(value, *packing) for name, value in state.items()}
        ages = ages[active].clone()
    return EntryUpdate(parameter, gradient, state, ages, block, index, 2, 5 if shared else None)


def copied(update):
    state = {name: value.clone() for name, value in update.state.items()}
    return dataclasses.replace(update, parameter=update.parameter.clone(), state=state)


def adam_numbers(dtype, length=100, **settings):
    """Adam's rule, its settings, and its numbers by age."""
    rule = Adam(torch.optim.Adam([torch.zeros(1, requires_grad=True)], **settings))
    ages = torch.arange(1, length + 1, dtype=torch.float64)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    numbers = torch.stack(rule.numbers(ages, 0.9, 0.999), 1).to(exact).contiguous()
    return rule, rule.settings(rule.optimizer.param_groups[0]), numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("blocks", "block"), [(70001, 1), (300, 257), (40, 3), (65, 1)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ages_dtype", [torch.int16, torch.int32])
def test_updates_agree(dtype, blocks, block, packed, shared, ages_dtype):
    updates = [adam_update(blocks, block, dtype, packed, shared, ages_dtype)]
    updates += [adam_update(9, 1, dtype, False, shared)]
    rule, settings, numbers = adam_numbers(dtype)
    ends = []
    for kernels, form in itertools.product(
        (NATIVE, REFERENCE), (pack_bits, positions) if packed else (None,)
    ):
        copies = [copied(update) for update in updates]
        if form:
            copies[0].index = form(unpack(copies[0].index, blocks))
        kernels.update(rule, settings, numbers, copies)
        ends.append([tensor for each in copies for tensor in (each.parameter, *each.state.values())])
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for own, *others in zip(*ends, strict=True):
        for other in others:
            torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


@pytest.fixture
def every_processor(monkeypatch):
    """Each kind of processor that this one can stand in for, in turn."""
    own = torch.backends.cpu.get_cpu_capability()
    kinds = ("DEFAULT", "AVX2", "AVX512")
    loaded = [value for value in vars(native).values() if hasattr(value, "cache_clear")]

    def processors():
        for kind in kinds[: kinds.index(own) + 1]:
            for each in loaded:
                each.cache_clear()
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
            yield kind

    yield processors()
    for each in loaded:
        each.cache_clear()


needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs a processor with vectors"
)


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_values_are_repacked_alike_on_every_processor(every_processor, dtype, share):
    source, target = (torch.rand(70001) < share for _ in range(2))
    values = torch.randint(-30000, 30000, (70001,), dtype=dtype)
    expected = torch.where(source, values, 7)[target]
    libraries = set()
    for _ in every_processor:
        indices = [pack_bits(flags) for flags in (source, target)]
        assert torch.equal(NATIVE.repack(values[source], *indices, 1, 70001, 7), expected)
        libraries.add(native._library()._name)
    assert len(libraries) > 1


@needs_vectors
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_give_the_same_bits_on_every_processor(every_processor, dtype):
    rule, settings, numbers = adam_numbers(dtype, weight_decay=0.1)
    update = adam_update(5001, 1, dtype, False, False)
    ends, libraries = [], set()
    for _ in every_processor:
        copy = copied(update)
        NATIVE.update(rule, settings, numbers, [copy])
        ends.append(torch.stack([copy.parameter, *copy.state.values()]))
        libraries.add(native._update_library("adam"))
    assert len(libraries) == len(ends) >= 2
    for other in ends[1:]:
        torch.testing.assert_close(ends[0], other, rtol=0, atol=0)


@pytest.fixture
def compilations(monkeypatch):
    """Sends updates through Dynamo, as on an accelerator; a graph for each time that it compiles."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(reference, "compiles", lambda device: True)
    monkeypatch.setattr(reference, "BACKEND", backend)
    reference.compiled_update.cache_clear()
    yield compiled
    reference.compiled_update.cache_clear()


@pytest.mark.parametrize(("block", "packed"), [(1, False), (6, True)])
def test_an_accelerators_code_is_compiled_once_whatever_ages_masks_and_shapes(
    compilations, monkeypatch, block, packed
):
    monkeypatch.setattr(reference, "JOINED", 2000)
    for length, sizes in ((1024, [50, 300]), (1024, [7, 9, 64, 11]), (2048, [3000]), (4096, [3000, 77])):
        rule, settings, numbers = adam_numbers(torch.float32, length)
        for uncounted in range(3):
            made = [adam_update(size, block, torch.float32, packed, False) for size in sizes]
            updates = [dataclasses.replace(each, uncounted=uncounted) for each in made]
            expected = [copied(update) for update in updates]
            REFERENCE.update(rule, settings, numbers, updates)
            with monkeypatch.context() as patch:
                patch.setattr(reference, "compiles", lambda device: False)
                REFERENCE.update(rule, settings, numbers, expected)
            for own, other in zip(updates, expected, strict=True):
                torch.testing.assert_close(own.parameter, other.parameter)
                torch.testing.assert_close(own.state, other.state)
    assert len(compilations) == 1


@pytest.mark.slow
def test_every_rule_and_dtype_is_compiled_once_whatever_the_optimizers(compilations):
    """In one process more is compiled than Dynamo allows of one function."""
    kinds = ("Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam")
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for _ in range(2):
        for kind, dtype in itertools.product(kinds, dtypes):
            weight = torch.nn.Parameter(torch.randn(40, dtype=dtype))
            optimizer = MaskedOptimizer(getattr(torch.optim, kind)([weight], lr=0.1))
            with mock.patch.object(native, "supports", return_value=False):
                optimizer.set_mask(weight, torch.rand(40) < 0.5)
                weight.grad = torch.ones_like(weight)
                optimizer.step()
    assert len(compilations) == len(kinds) * len(dtypes)
