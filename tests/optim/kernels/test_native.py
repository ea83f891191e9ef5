"""The C stays within the memory that it is given."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ("kernels/test_kernels.py", "test_masked_parameter.py", "test_any_order.py")


def sanitizer(name):
    """The path of a library of gcc's; None where it is missing."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None
    found = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


@pytest.mark.slow
@pytest.mark.skipif(sanitizer("libasan.so") is None, reason="needs gcc with AddressSanitizer")
def test_nothing_outside_the_tensors_is_read_or_written(tmp_path):
    for name in ("gradpolicy", "tests", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("built", "__pycache__"))
    for name in ("pyproject.toml", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {
        **os.environ,
        "CC": "gcc -fsanitize=address -g",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_PRELOAD": f"{sanitizer('libasan.so')} {sanitizer('libstdc++.so')}",
        # Python never frees all that it holds, and its own allocator would hide what lies beside a block.
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(tmp_path),
    }
    tests = [f"tests/optim/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:faulthandler", "-m", "not slow", *tests]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    assert list((tmp_path / "cache").rglob("update-adam-*.so"))
