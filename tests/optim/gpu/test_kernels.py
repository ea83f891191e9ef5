"""The kernels for a GPU where there is none: interpreted, compiled ahead of time, or not to be had.

Tests that need a GPU stand with those of the same behaviour elsewhere, marked `gpu`.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.machinery import launching
from gradpolicy.machinery.compiling import compiler
from gradpolicy.optim.gpu import moves as gpu_moves

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this platform"
)


def run(*command, **variables):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment, check=False
    )


def run_tests(*options, **variables):
    """Run under_interpreter.py in its own process."""
    plugins = ("cacheprovider", "xdist", "hypothesispytest")
    less = [option for plugin in plugins for option in ("-p", f"no:{plugin}")]
    less += ["--noconftest", "-W", "ignore::RuntimeWarning"]
    return run("-m", "pytest", HERE / "under_interpreter.py", *less, *options, **variables)


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_do_what_torch_does():
    ended = run_tests(TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@needs_triton
@pytest.mark.skipif(not compiler(), reason="needs a C compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU where there is none")
@pytest.mark.slow
def test_kernels_are_compiled_and_launched_as_on_a_gpu(cache):
    plugin = ("-p", "tests.optim.gpu.interpreted_launches")
    ended = run_tests(*plugin, TRITON_CACHE_DIR=cache)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@functools.cache
def built(capability, cache):
    """What the kernels are compiled to."""
    ended = run(HERE / "compile_kernels.py", capability, TRITON_CACHE_DIR=cache)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("triton"))


capabilities = pytest.mark.parametrize(
    "capability", [pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 90)]
)


@needs_triton
@capabilities
def test_kernels_compile_and_keep_to_their_registers(capability, cache):
    made = built(capability, cache)
    assert len(made) == 16
    for name, kernel in made.items():
        assert kernel["stack"] == 0, name
        # Of 65536, so that at least two programs of 256 threads run beside each other.
        assert kernel["registers"] <= 128, name


@needs_triton
@capabilities
@pytest.mark.parametrize(
    ("name", "read", "written"), [("entries", 4, 3), ("entries, many ages", 5, 4), ("rows", 4, 3)]
)
def test_memory_is_read_and_written_in_pieces_of_16_bytes(capability, cache, name, read, written):
    words = built(capability, cache)[name]["words"]
    assert words["ld.global.v4.b32"] == read
    assert words["st.global.v4.b32"] == written


@pytest.fixture
def on_gpu(monkeypatch):
    """As if the CPU were a GPU; what is kept of failures is forgotten afterwards."""
    monkeypatch.setattr(launching, "DEVICES", {"cpu"})
    monkeypatch.setattr(launching, "_refused", set())
    launching.available.cache_clear()
    yield
    launching.available.cache_clear()


def steps_with_masks():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1), frozen_state="drop")
    for _ in range(3):
        optimizer.set_mask(parameter, torch.rand(40, 3) < 0.5)
        parameter.grad = torch.randn(40, 3)
        optimizer.step()
    return parameter.detach()


def test_without_triton_torch_does_the_work_which_is_said_once(on_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="worked on by plain torch operations") as said:
        moved = steps_with_masks()
    assert len(said) == 1
    monkeypatch.setattr(launching, "DEVICES", set())
    torch.testing.assert_close(moved, steps_with_masks())


class Uncompilable:
    """Kernels that a device's compiler refuses."""

    class TILE:
        value = 1024

    WIDE = TILE

    class Kind:
        def __init__(self, **given):
            self.columns = given["columns"]

    tl = torch

    def __getattr__(self, name):
        return self

    def __getitem__(self, grid):
        raise RuntimeError("compute capability 3.5 is too old")


def test_where_kernels_do_not_compile_torch_does_the_work_which_is_said_once(on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_moves, "source", Uncompilable)
    with pytest.warns(UserWarning, match=r"RuntimeError: compute capability 3\.5 is too old") as said:
        moved = steps_with_masks()
    assert len(said) == 1
    monkeypatch.setattr(launching, "DEVICES", set())
    torch.testing.assert_close(moved, steps_with_masks())
