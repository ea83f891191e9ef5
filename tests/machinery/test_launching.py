"""Triton kernels are a GPU's, come late, and are never a condition; tests/optim/gpu checks what they do."""

import functools
import importlib
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

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
        "assert not [n for n in sys.modules if n.endswith('.gpu.kernels')]"
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
        found = [launching.module("gradpolicy.optim.gpu.kernels") for _ in range(2)]
    assert found == [None, None]
    assert len(said) == 1


def test_a_device_that_a_kernel_cannot_be_compiled_for_is_asked_once(monkeypatch):
    monkeypatch.setattr(launching, "DEVICES", {"cpu"})
    monkeypatch.setattr(launching, "available", lambda: True)
    device = torch.device("cpu")

    class Uncompilable:
        def __getitem__(self, grid):
            raise RuntimeError("too old a device")

    assert launching.launch(Uncompilable(), 0, device)
    with pytest.warns(UserWarning, match="RuntimeError: too old a device"):
        assert not launching.launch(Uncompilable(), 1, device)
    assert not launching.serve(torch.zeros(4))


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this platform"
)


class Compiled:
    """Stands for what Triton compiled, and notes by which way it is launched."""

    function, packed_metadata, arg_names = "function", "metadata", ["x", "SIZE"]

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches.append(("looked up", grid[0], *arguments, *options.values()))
            return self

        return run

    def run(self, *arguments):
        self.launches.append(("kept", *arguments))


@pytest.fixture
def compiled(monkeypatch):
    runtime = importlib.import_module("triton.runtime")
    monkeypatch.setattr(runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda device: 7))
    return Compiled()


@needs_triton
def test_what_was_compiled_is_launched_again_without_a_look(compiled):
    launch = launching.Launcher(compiled, torch.device("cpu"), 8, {"SIZE": 32})
    for programs in (2, 3, 0):
        assert launch(programs, 1.5)
    first, again = compiled.launches
    assert first == ("looked up", 2, 1.5, 32, 8)
    assert again == ("kept", 3, 1, 1, 7, "function", "metadata", None, None, None, 1.5, 32)


@needs_triton
def test_who_listens_to_launches_hears_of_them(compiled, monkeypatch):
    knobs = importlib.import_module("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    launch = launching.Launcher(compiled, torch.device("cpu"), 8, {"SIZE": 32})
    for _ in range(2):
        launch(3, 1.5)
    assert compiled.launches[1] == ("looked up", 3, 1.5, 32)


@needs_triton
@pytest.mark.parametrize("other", [torch.zeros(9)[1:], torch.zeros(9).double(), 17, 1, 1 << 40, 2.0])
def test_arguments_that_look_otherwise_are_compiled_for_anew(compiled, other, monkeypatch):
    monkeypatch.setattr(launching, "_kept", functools.cache(launching._kept.__wrapped__))
    device = torch.device("cpu")
    same = (torch.zeros(4), torch.zeros(8)) if isinstance(other, torch.Tensor) else (16, 32)
    for argument in (*same, other):
        launching.launch(compiled, 1, device, argument, SIZE=32)
    assert [way for way, *_ in compiled.launches] == ["looked up", "kept", "looked up"]


def test_small_tables_go_to_the_device_as_they_are():
    values = torch.arange(3)
    assert torch.equal(launching.upload(values, torch.device("cpu")), values)
