import pytest
import torch

from gradpolicy.optim.kernels import native

KERNELS = ("native", "reference")


GPU = pytest.param(
    "gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.fixture
def use(monkeypatch):
    """Has these kernels do the work from then on."""

    def choose(kernels):
        if kernels == "reference":
            monkeypatch.setattr(native, "supports", lambda *_: False)
        elif kernels == "gpu":
            torch.set_default_device("cuda")

    yield choose
    torch.set_default_device(None)


@pytest.fixture(params=[*KERNELS, GPU])
def kernels(request, use):
    """Runs a test with the C kernels, as where there is no compiler, and on a GPU."""
    use(request.param)
    return request.param


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
