"""Strategy × policy × precision × frozen_state: two ranks equal one process with the joined batch."""

import functools
from typing import Any

import pytest
import torch
from combinations import combinations
from process_pool import ProcessPool
from runs import UPDATES, fit

TOLERANCES = {"32-true": {"rtol": 2e-4, "atol": 2e-5}, "bf16-mixed": {"rtol": 0.05, "atol": 0.01}}
FREEZING = ["layers", "tensors", "rows", "entries", "from the start", "all kinds"]
FLOWING = ["none", "stop", "cut off", "straight through"]
STRATEGIES = ["ddp", "zero1", "fsdp2"]
FAST_FLOWING = [
    *(("ddp", kind) for kind in FLOWING),
    ("zero1", "stop"),
    ("fsdp2", "cut off"),
    ("fsdp2", "straight through"),
]


@functools.cache
def alone(kind: str, frozen_state: str, precision: str) -> dict[str, Any]:
    return fit("one process", kind, frozen_state, precision)


def check(pair: ProcessPool, strategy: str, kind: str, frozen_state: str, precision: str) -> None:
    first, second = pair(fit, strategy, kind, frozen_state, precision)
    expected = alone(kind, frozen_state, precision)
    for what in ("masks", "ages"):
        assert first[what].keys() == expected[what].keys()
        assert all(torch.equal(first[what][name], expected[what][name]) for name in expected[what]), what
    for name, weight in expected["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), f"{name} differs between ranks"
        torch.testing.assert_close(first["weights"][name], weight, **TOLERANCES[precision])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "frozen_state"), [("layers", "keep"), ("entries", "zero"), ("all kinds", "drop")]
)
def test_two_ranks_equal_one_process(pair: ProcessPool, strategy: str, kind: str, frozen_state: str) -> None:
    check(pair, strategy, kind, frozen_state, "32-true")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", FREEZING)
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_whole_matrix_of_freezing(
    pair: ProcessPool, strategy: str, kind: str, frozen_state: str, precision: str
) -> None:
    check(pair, strategy, kind, frozen_state, precision)


@pytest.mark.parametrize(("strategy", "kind"), combinations(FAST_FLOWING, STRATEGIES, FLOWING))
def test_flow_policies_hold_on_every_strategy(pair: ProcessPool, strategy: str, kind: str) -> None:
    check(pair, strategy, kind, "keep", "32-true")
    assert len(alone(kind, "keep", "32-true")["losses"]) == UPDATES
