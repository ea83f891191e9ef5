import pytest
import torch

GPU = pytest.param(
    "gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """Runs a test on the CPU, and on a GPU."""
    if request.param == "gpu":
        torch.set_default_device("cuda")
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
