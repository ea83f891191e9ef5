"""The C kernels and torch do the same; for accelerators one function is compiled."""

import itertools

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.compiling import compiler
from gradpolicy.optim.kernels import native, reference


def trained(shapes, mask_shape, kind, frozen_state, dtype=torch.float32):
    """Tensors after six updates under masks that change, with their state."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = MaskedOptimizer(kind(weights, lr=0.1), frozen_state)
    for step in range(6):
        for weight in weights:
            if step % 2 == 0:
                share = 0.02 if step == 4 and len(weight) > 1000 else 0.6  # packed as positions, or as bits
                optimizer.set_mask(weight, torch.rand(mask_shape(weight)) < share)
            weight.grad = torch.randn(weight.shape).to(dtype)
        optimizer.step()
    state = [value for own in optimizer.state_dict(dense=True)["state"].values() for value in own.values()]
    return [weight.detach() for weight in weights] + state


def entries(weight):
    return weight.shape


def rows(weight):
    return (len(weight), 1)


@pytest.mark.skipif(not compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("mask_shape", [entries, rows])
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_tensors_move_as_by_torch_operations(use, monkeypatch, mask_shape, frozen_state, dtype):
    """Sizes at which threads share the work, and the remainders of vectors."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert native.supports([dtype], "adam")
    arguments = [(70001, 1), (64, 257), (5, 3)], mask_shape, torch.optim.AdamW, frozen_state, dtype
    found = trained(*arguments)
    use("reference")
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(found, trained(*arguments), rtol=tolerance, atol=tolerance)


@pytest.fixture
def compilations(monkeypatch, use):
    """Sends updates through Dynamo, as on an accelerator; a graph for each time that it compiles."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    use("reference")
    monkeypatch.setattr(reference, "compiles", lambda device: True)
    monkeypatch.setattr(reference, "BACKEND", backend)
    # Dynamo remembers sizes that varied in an earlier test.
    torch.compiler.reset()
    reference.compiled_update.cache_clear()
    yield compiled
    reference.compiled_update.cache_clear()


@pytest.mark.parametrize(("mask_shape", "frozen_state"), [(entries, "keep"), (rows, "drop")])
def test_code_for_accelerators_is_compiled_once(compilations, monkeypatch, mask_shape, frozen_state):
    """Whatever ages, masks and shapes; small tensors are joined."""
    monkeypatch.setattr(reference, "JOINED", 2000)
    for shapes in ([(50, 2), (30, 9)], [(7, 3), (9, 3), (64, 2), (11, 4)], [(3000, 2)]):
        arguments = shapes, mask_shape, torch.optim.AdamW, frozen_state
        found = trained(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "compiles", lambda device: False)
            torch.testing.assert_close(found, trained(*arguments))
    assert len(compilations) == 1


@pytest.mark.slow
def test_every_rule_and_dtype_is_compiled_once(compilations):
    """In one process more is compiled than Dynamo allows of one function."""
    kinds = ("Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam")
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for _, kind, dtype in itertools.product(range(2), kinds, dtypes):
        trained([(40, 1)], entries, getattr(torch.optim, kind), "keep", dtype)
    assert len(compilations) == len(kinds) * len(dtypes)
