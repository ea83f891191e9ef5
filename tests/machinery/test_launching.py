"""Triton kernels are a GPU's, come late, and are never a condition; tests/optim/gpu checks what they do."""

import subprocess
import sys

import pytest
import torch

from gradpolicy.machinery import launching


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What is known of Triton and of devices is found out anew."""
    monkeypatch.setattr(launching, "_refused", set())
    available = launching.available
    available.cache_clear()
    yield
    available.cache_clear()


def test_on_a_cpu_no_kernel_is_loaded():
    code = (
        "import sys, torch, gradpolicy as gp; p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4);"
        "o = gp.MaskedOptimizer(torch.optim.Adam([p])); o.set_mask(p, p.detach().cumsum(0) > 2); o.step();"
        "assert not [n for n in sys.modules if n.endswith(('.gpu.kernels', '.hashing_kernel'))]"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_serve_contiguous_tensors_of_one_gpu(monkeypatch):
    assert not launching.serve(torch.zeros(4))
    monkeypatch.setattr(launching, "DEVICES", {"cpu"})
    monkeypatch.setattr(launching, "available", lambda: True)
    assert launching.serve(torch.zeros(4), torch.zeros(3))
    assert not launching.serve(torch.zeros(4), torch.zeros(4)[::2])
    assert not launching.serve(torch.zeros(4), torch.zeros(4, device="meta"))


def test_without_triton_there_are_none_which_is_said_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="Triton cannot be imported") as said:
        found = [
            launching.module(f"gradpolicy.{name}") for name in ("optim.gpu.kernels", "freeze.hashing_kernel")
        ]
    assert found == [None, None]
    assert len(said) == 1


def test_a_device_that_a_kernel_cannot_be_compiled_for_is_asked_once(monkeypatch):
    monkeypatch.setattr(launching, "DEVICES", {"cpu"})
    monkeypatch.setattr(launching, "available", lambda: True)
    device = torch.device("cpu")
    assert launching.launch({}, 0, device)
    with pytest.warns(UserWarning, match="KeyError"):
        assert not launching.launch({}, 1, device)
    assert not launching.serve(torch.zeros(4))


def test_small_tables_go_to_the_device_as_they_are():
    values = torch.arange(3)
    assert torch.equal(launching.upload(values, torch.device("cpu")), values)
