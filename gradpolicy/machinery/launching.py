"""Triton kernels: loaded when a GPU is first met, compiled at their first use, never a condition for running.

Where Triton is missing, or cannot compile for the device, torch operations do the work, which is said once.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DEVICES = {"cuda", "xpu"}
"""Kinds of device whose builds of torch bring Triton."""
WARPS = 4
"""How many each program has, where nothing else is said."""
_refused: set[torch.device] = set()


@functools.cache
def available() -> bool:
    """Whether there is Triton; one warning where there is not."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        _say(f"Triton cannot be imported: {error}")
        return False
    return True


def module(name: str) -> ModuleType | None:
    """A module of kernels; None where there is no Triton."""
    return importlib.import_module(name) if available() else None


def _say(reason: str) -> None:
    warnings.warn(
        f"gradpolicy: masks on the GPU are worked on by plain torch operations ({reason[:300]})", stacklevel=2
    )


def serve(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors."""
    device = tensors[0].device
    if device.type not in DEVICES or device in _refused or not available():
        return False
    return all(tensor.is_contiguous() and tensor.device == device for tensor in tensors)


class Launcher:
    """A kernel that is run again and again, each time with arguments of the same types and alignment.

    Triton looks at every argument at each launch, to find the code compiled for such; here that is kept.

    Args:
        kernel: the kernel.
        device: where it runs.
        warps: how many each program has.
        constants: its last arguments, by name.
    """

    def __init__(self, kernel: Any, device: torch.device, warps: int, constants: dict[str, Any]) -> None:
        self._kernel, self._device, self._warps, self._constants = kernel, device, warps, constants
        self._again: Callable[[int, tuple[Any, ...]], None] | None = None

    def __call__(self, programs: int, *arguments: Any) -> bool:
        """Run it; False, and one warning, where it cannot be compiled for the device."""
        if not programs:
            return True
        if self._again is None:
            return _attempt(self._device, lambda: self._first(programs, arguments))
        with _current(self._device):
            self._again(programs, arguments)
        return True

    def _first(self, programs: int, arguments: tuple[Any, ...]) -> None:
        run = self._kernel[(programs,)]
        compiled = run(*arguments, **self._constants, num_warps=self._warps)
        if compiled is not None:  # as it is by Triton's interpreter
            ordered = [self._constants[name] for name in self._kernel.arg_names[len(arguments) :]]
            self._again = _relaunch(compiled, self._device, ordered)


def _relaunch(
    compiled: Any, device: torch.device, constants: list[Any]
) -> Callable[[int, tuple[Any, ...]], None]:
    """Launches what is compiled as Triton itself does, less what Triton looks up each time."""
    triton = importlib.import_module("triton")
    knobs, stream_of = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    # Which are for those that listen to launches.
    unheard = None, None, None

    def again(programs: int, arguments: tuple[Any, ...]) -> None:
        hook = knobs.launch_enter_hook
        if getattr(hook, "calls", hook):
            compiled[programs, 1, 1](*arguments, *constants)
        else:
            stream = stream_of(device.index)
            run(programs, 1, 1, stream, function, metadata, *unheard, *arguments, *constants)

    return again


@functools.cache
def launcher(kernel: Any, device: torch.device, warps: int, **constants: Any) -> Launcher:
    """The launcher of a kernel with these constants as its last arguments."""
    return Launcher(kernel, device, warps, constants)


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel; False, and one warning, where it cannot be compiled for the device."""
    kept = _kept(kernel, device, tuple(map(_look, arguments)), **constants)
    return kept(programs, *arguments)


@functools.cache
def _kept(kernel: Any, device: torch.device, looks: tuple[Any, ...], **constants: Any) -> Launcher:
    """The launcher for arguments that look so."""
    return Launcher(kernel, device, WARPS, constants)


def _look(argument: Any) -> Any:
    """What Triton compiles code for: types, multiples of 16, 1, and on AMD's GPUs memory below 2 GB."""
    if isinstance(argument, Tensor):
        small = argument.untyped_storage().nbytes() < 1 << 31
        return argument.dtype, argument.data_ptr() % 16 == 0, small
    return type(argument), argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31


def _attempt(device: torch.device, run: Callable[[], Any]) -> bool:
    try:
        with _current(device):
            run()
    except Exception as error:  # compilers fail in many ways, before anything is written
        _refused.add(device)
        _say(f"{type(error).__name__}: {error}")
        return False
    return True


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within, kernels are launched on this device."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = module.device(device)
    return guard


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for the work that it has."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


class Resident:
    """A small CPU tensor, and a copy on the device that is made once, and again where the stream changes.

    Args:
        values: what to copy.
        device: where to.
    """

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self._values, self._device = values, device
        self._copy: Tensor | None = None
        self._stream: Any = None

    def here(self) -> Tensor:
        """The copy, for work on the current stream."""
        stream = None
        if self._device.type != "cpu":
            stream = torch.get_device_module(self._device).current_stream(self._device)
        if self._copy is None or stream != self._stream:
            self._copy, self._stream = upload(self._values, self._device), stream
        return self._copy
