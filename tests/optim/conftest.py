import pytest
import torch

from gradpolicy.optim import native


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["kernel", "torch"])
def machinery(request, monkeypatch):
    """Runs a test with the C kernel, and again as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
