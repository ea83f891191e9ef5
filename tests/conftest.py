"""What all tests share, and which cases are slow."""

import gc
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.support_matrix"]

# A loop of DTensor.full_tensor on two gloo ranks, with torch 2.13 alone, corrupts the heap of a rank about
# once in 500,000 calls. So a test of which a rank died is run once more, and counted as a rerun. Only tests
# with ranks have the mark: its plugin lets a worker ask the process that started it, 40 ms a test.
ON_RANKS = {"pair", "pools", "ranks"}
RUN_AGAIN = pytest.mark.flaky(reruns=1, only_rerun="the process died")


def pytest_configure(config: pytest.Config) -> None:
    """Import torch, Lightning and the fixtures, but not into the process that starts the workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch
        from hypothesis import HealthCheck, settings

        torch.set_num_threads(1)
        # The same examples in each run, however busy the machine is. scripts/fuzz.py searches for others.
        settings.register_profile(
            "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("steady")
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave the many objects that imports make, and that stay, out of garbage collection."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test that is mostly slow every fourth case is quick: all of them run in one suite or the other.

    Tests that need seven processes run on one worker, since these take long to start.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if ON_RANKS.intersection(fixtures):
            item.add_marker(RUN_AGAIN)
        if "pools" in fixtures:
            item.add_marker(pytest.mark.xdist_group("pools"))
        if item.get_closest_marker("mostly_slow"):
            test = item.path, item.originalname
            if cases[test] % 4:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
