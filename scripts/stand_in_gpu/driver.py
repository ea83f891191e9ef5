"""Triton's CUDA driver on top of driver.c."""

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime import driver

from gradpolicy.errors import PolicyError
from gradpolicy.machinery import compiling

CAPABILITY = (9, 0)
"""What kernels are compiled for."""
LIBRARY = "libcuda.so.1"
OnLaunch = Callable[[Any, int, Any], None]
"""Is given what was compiled, how many programs run, and where each argument lies that is no constant."""
_LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))


def begin(on_launch: OnLaunch | None = None) -> None:
    """Have Triton launch through the stand-in from now on.

    Args:
        on_launch: has the launches; None: nothing runs.

    Raises:
        PolicyError: there is no C compiler.
    """
    library = _library()
    driver.set_active(_Driver(on_launch))
    library.stand_in_on_launch(_launched if on_launch else _LAUNCHED())


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiled, and loaded before anything asks for a library of this name."""
    compiler = compiling.compiler()
    if not compiler:
        raise PolicyError("the stand-in for a GPU's driver needs a C compiler, and none was found")
    folder = Path(tempfile.mkdtemp(prefix="stand-in-gpu-"))
    source = Path(__file__).with_name("driver.c")
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(folder / LIBRARY)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)


class _Driver(CudaDriver):
    """One device, always current, with one stream."""

    def __init__(self, on_launch: OnLaunch | None) -> None:
        super().__init__()
        self.get_device_capability = lambda device=None: CAPABILITY
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        if on_launch:
            _Launcher.on_launch = staticmethod(on_launch)
            self.launcher_cls = _Launcher


class _Launcher(CudaLauncher):
    """Knows at a launch what is launched, and brings errors back that C would lose."""

    on_launch: OnLaunch
    present: Any = None
    error: BaseException | None = None

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        self._source = source

    def __call__(self, *arguments: Any) -> None:
        _Launcher.present, _Launcher.error = self._source, None
        super().__call__(*arguments)
        if _Launcher.error is not None:
            raise _Launcher.error


@_LAUNCHED
def _launched(_: int, programs: int, arguments: Any) -> None:
    try:
        _Launcher.on_launch(_Launcher.present, programs, arguments)
    except BaseException as error:
        _Launcher.error = error
