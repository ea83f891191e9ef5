"""Strategy × policy × precision × frozen_state: two ranks equal one process with the joined batch."""

import functools
from typing import Any

import pytest
from combinations import combinations
from process_pool import ProcessPool
from runs import UPDATES, check_equal, fit

TOLERANCES: dict[str, Any] = {"32-true": {}, "bf16-mixed": {"rtol": 0.05, "atol": 0.01}}
FREEZING = ["layers", "tensors", "rows", "entries", "from the start", "all kinds"]
FLOWING = ["none", "stop", "cut off", "straight through"]
IN_THE_TABLE = {
    "layers": "tensors",
    "from the start": "tensors",
    "all kinds": "entries",
    "32-true": "clipping",
    "bf16-mixed": "mixed precision",
}
"""What docs/support.md calls them."""
STRATEGIES = ["ddp", "fsdp2"]
FROZEN_STATES, PRECISIONS = ["keep", "zero", "drop"], list(TOLERANCES)
FAST_FREEZING = [
    (strategy, *settings, "32-true")
    for strategy in STRATEGIES
    for settings in (("layers", "keep"), ("entries", "zero"), ("all kinds", "drop"))
]
FAST_FLOWING = [
    *(("ddp", kind, "32-true") for kind in FLOWING),
    ("fsdp2", "cut off", "32-true"),
    ("fsdp2", "straight through", "32-true"),
]


@functools.cache
def alone(kind: str, frozen_state: str, precision: str) -> dict[str, Any]:
    return fit("one process", kind, frozen_state, precision)


def check(pair: ProcessPool, strategy: str, kind: str, frozen_state: str, precision: str) -> None:
    ranks = pair(fit, strategy, kind, frozen_state, precision)
    check_equal(ranks, alone(kind, frozen_state, precision), **TOLERANCES[precision])


@pytest.mark.supports(
    *("{kind}", "{precision}", "frozen_state"), loop="lightning", processes="{strategy}", names=IN_THE_TABLE
)
@pytest.mark.parametrize(
    ("strategy", "kind", "frozen_state", "precision"),
    combinations(FAST_FREEZING, STRATEGIES, FREEZING, FROZEN_STATES, PRECISIONS),
)
def test_two_ranks_equal_one_process(
    pair: ProcessPool, strategy: str, kind: str, frozen_state: str, precision: str
) -> None:
    check(pair, strategy, kind, frozen_state, precision)


@pytest.mark.supports("flow", loop="lightning", processes="{strategy}")
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("strategy", "kind", "precision"), combinations(FAST_FLOWING, STRATEGIES, FLOWING, PRECISIONS)
)
def test_flow_policies_hold_on_every_strategy(
    pair: ProcessPool, strategy: str, kind: str, precision: str
) -> None:
    check(pair, strategy, kind, "keep", precision)
    assert len(alone(kind, "keep", precision)["losses"]) == UPDATES
