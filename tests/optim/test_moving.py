"""The one function that moves entries: compiled as eager, compiled seldom, and never eager in silence."""

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.optim import compiling, moving
from gradpolicy.optim.ages import Ages

SHAPES = [(50, 20), (30, 9), (7, 3), (5, 2, 2), (3,), (1, 4), ()]


def trained(frozen_state, rows, changes=2, lr=0.1):
    """Tensors after updates under masks that change, with garbage in frozen gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = MaskedOptimizer(torch.optim.AdamW(weights, lr=lr), frozen_state)
    for step in range(2 * changes):
        for weight in weights:
            cut = weight.shape[:1] + (1,) * (weight.dim() - 1) if rows else weight.shape
            if step % 2 == 0:
                optimizer.set_mask(weight, torch.rand(cut, generator=generator) < 0.5)
            frozen = ~optimizer.get_mask(weight)
            weight.grad = torch.randn(weight.shape, generator=generator).masked_fill(frozen, torch.nan)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.fixture
def compilations(monkeypatch):
    """Sends all updates through Dynamo; a graph for each time that it compiles."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "COMPILE_FROM", 0)
    monkeypatch.setattr(compiling, "BACKEND", backend)
    monkeypatch.setattr(compiling, "_said", set())
    monkeypatch.setattr(compiling, "_known", set())
    compiling._compiled.cache_clear()
    yield compiled
    compiling._compiled.cache_clear()


@pytest.mark.parametrize(
    ("frozen_state", "rows"), [("keep", False), ("zero", False), ("keep", True), ("drop", True)]
)
def test_compiled_updates_are_the_eager_ones(compilations, monkeypatch, frozen_state, rows):
    found = trained(frozen_state, rows)
    kinds = len(compilations)
    assert kinds > 0
    # Other rates, ages and masks compile nothing more.
    trained(frozen_state, rows, lr=0.01)
    assert len(compilations) == kinds
    monkeypatch.setattr(compiling, "COMPILE_FROM", 1 << 60)
    torch.testing.assert_close(found, trained(frozen_state, rows))


def test_a_line_says_that_updates_are_compiled(compilations, caplog):
    trained("keep", False, 1)
    trained("keep", False, 1)
    assert [record.message for record in caplog.records if "torch.compile compiles" in record.message] == [
        "torch.compile compiles the updates of masked entries, once, which takes a while"
    ]


def test_without_a_compiler_one_warning_says_that_updates_are_not_compiled(compilations, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiling, "BACKEND", broken)
    with pytest.warns(UserWarning, match=r"uncompiled code.*no C\+\+ compiler") as warnings:
        found = trained("keep", False)
    assert len(warnings) == 1
    monkeypatch.setattr(compiling, "COMPILE_FROM", 1 << 60)
    torch.testing.assert_close(found, trained("keep", False))


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_joined_tensors_move_as_alone(monkeypatch, frozen_state):
    joined, join = [], moving._join

    def counted(pieces):
        joined.append(len(pieces))
        return join(pieces)

    monkeypatch.setattr(moving, "_join", counted)
    monkeypatch.setattr(moving, "SMALL", 1)
    expected = trained(frozen_state, False)
    assert max(joined, default=1) == 1
    monkeypatch.setattr(moving, "SMALL", 1 << 14)
    torch.testing.assert_close(trained(frozen_state, False), expected)
    assert max(joined) > 1
    monkeypatch.setattr(moving, "on_cpu", lambda tensor: False)  # as on an accelerator
    torch.testing.assert_close(trained(frozen_state, False), expected)


def test_a_mask_that_is_set_again_changes_no_bit():
    """As in a run that resumes, where masks are set once more."""
    ends = []
    for again in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 999))
        optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1))
        masks = [torch.arange(999) % number > 0 for number in (2, 3)]
        for step in range(20):
            if step % 10 == 0 or again:
                optimizer.set_mask(weight, masks[step // 10])
            weight.grad = weight.detach().sin()
            optimizer.step()
        ends.append(weight.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("chunk", [2, 1 << 18])
def test_ages_keep_their_shape_where_a_mask_is_lifted(chunk, monkeypatch):
    monkeypatch.setattr("gradpolicy.optim.shapes.CHUNK", chunk)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    ages = Ages.all_active(2, (2, 3), mask.device).turned(mask)
    ages.count()
    lifted = ages.turned(torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(lifted.dense(), 2 + mask.to(torch.uint8))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (1, 6)])
@pytest.mark.parametrize("seed", range(8))
def test_ages_are_those_that_are_counted_entry_by_entry(forget, shape, seed, monkeypatch):
    monkeypatch.setattr("gradpolicy.optim.shapes.CHUNK", 5)
    generator = torch.Generator().manual_seed(seed)
    expected, ages = torch.zeros(4, 6).long(), Ages.all_active(0, (4, 6), torch.device("cpu"))
    for share in (0.5, 0.9, 0.1, 1.0, 0.5, 0.0, 0.5, 1.0):
        cut = shape if torch.rand((), generator=generator) < 0.5 else (4, 6)
        mask = torch.rand(cut, generator=generator) < share
        ages = ages.turned(mask, forget=forget)
        expected = expected * mask if forget else expected
        # Beyond what a byte can hold.
        for _ in range(int(torch.randint(1, 200, (), generator=generator))):
            expected = expected + mask
            if mask.any():
                ages.count()
        assert torch.equal(ages.dense().expand(4, 6).long(), expected)
        assert ages.oldest >= int((expected * mask).max())
        packed = ages.packed() if ages.is_partial and forget else ages
        assert torch.equal((packed.signed().abs().expand(4, 6) - 1) * mask, expected * mask)
