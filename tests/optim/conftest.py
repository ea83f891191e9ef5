import pytest
import torch

from gradpolicy.optim.kernels import native

KERNELS = ("native", "reference")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def use(monkeypatch):
    """Has these kernels do the work from then on."""

    def choose(kernels):
        if kernels == "reference":
            monkeypatch.setattr(native, "supports", lambda *_: False)

    return choose


@pytest.fixture(params=KERNELS)
def kernels(request, use):
    """Runs a test with the C kernels, and as where there is no compiler."""
    use(request.param)
    return request.param


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
