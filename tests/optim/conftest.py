import pytest
import torch

from gradpolicy.optim.jitted import moves as jitted
from gradpolicy.optim.native import moves as native


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


MACHINERIES = {"kernel": (), "numba": (native,), "torch": (native, jitted)}
"""What does the work, and what must be missing for that."""


@pytest.fixture
def use(monkeypatch):
    """Has a machinery do the work from then on."""

    def choose(machinery):
        for missing in MACHINERIES[machinery]:
            monkeypatch.setattr(missing, "library", lambda: None)

    return choose


@pytest.fixture(params=["kernel", pytest.param("numba", marks=pytest.mark.slow), "torch"])
def machinery(request, use):
    """Runs a test with the C kernel, as where there is no compiler, and as where there is no numba either."""
    use(request.param)
    return request.param


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
