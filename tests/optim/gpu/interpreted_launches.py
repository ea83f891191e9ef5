"""A plugin of pytest: kernels are compiled and launched as on a GPU, and interpreted where they would start.

The interpreter gets the arguments that were handed over to the driver, once they were found to be what the
compiled code presumes: multiples of 16, where it was compiled for such.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import os
import sys

import torch
from stand_in_gpu import driver

POINTED_AT = {"u1": torch.bool, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
POINTED_AT |= {"fp64": torch.float64, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16}
POINTED_AT |= {"i32": torch.int32, "i64": torch.int64}
PLAIN = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def pytest_configure():
    check_alignment()
    driver.begin(interpret)


def interpret(source, programs, places):
    """Run a kernel that was compiled from `source`, with the arguments that lie at these places."""
    arguments, handed_over = [], 0
    for index, name in enumerate(source.fn.arg_names):
        form = source.signature[name]
        if form == "constexpr":
            arguments.append(as_twin(source.constants[index,]))
            continue
        argument = argument_at(places[handed_over], form)
        for attribute, divisor in source.attrs.get((index,), []):
            value = argument.data_ptr() if form.startswith("*") else argument
            assert attribute == "tt.divisibility"
            assert value % divisor == 0, (
                f"{source.name}: {name} is {value}, and was to be a multiple of {divisor}"
            )
        arguments.append(argument)
        handed_over += 1
    with interpreter():
        kernel = getattr(twin(source.fn.fn.__module__), source.fn.__name__)
        kernel[(programs,)](*arguments)


def argument_at(place, form):
    """What lies there: a number, or where it is an address, a tensor that begins there."""
    if not form.startswith("*"):
        return ctypes.cast(place, ctypes.POINTER(PLAIN[form])).contents.value
    address = ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64)).contents.value
    dtype = POINTED_AT[form[1:]]
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


# --- Triton decides as it is imported whether it compiles or interprets: here there are two of it.


def triton_modules():
    """What is imported of it, less what is not Python."""
    names = [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]
    return {name: sys.modules[name] for name in names}


def exchange(modules):
    for name in triton_modules():
        del sys.modules[name]
    sys.modules.update(modules)


@contextlib.contextmanager
def interpreter():
    """Within, `import triton` gives the one that interprets."""
    compiling = triton_modules()
    try:
        exchange(interpreting())
        yield
    finally:
        exchange(compiling)


@functools.cache
def interpreting():
    compiling = triton_modules()
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        exchange({})
        importlib.import_module("triton.runtime.interpreter")
        return triton_modules()
    finally:
        del os.environ["TRITON_INTERPRET"]
        exchange(compiling)


@functools.cache
def twin(name):
    """A module of kernels once more, for the interpreter."""
    specification = importlib.util.find_spec(name)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with interpreter():
            module = importlib.util.module_from_spec(specification)
            specification.loader.exec_module(module)
    finally:
        del os.environ["TRITON_INTERPRET"]
    return module


def as_twin(constant):
    """A constant of a kernel, of the types that its twin knows."""
    if dataclasses.is_dataclass(constant):
        fields = {field.name: getattr(constant, field.name) for field in dataclasses.fields(constant)}
        kind = getattr(twin(type(constant).__module__), type(constant).__name__)
        return kind(**{name: as_twin(value) for name, value in fields.items()})
    if type(constant).__name__ == "dtype":
        return interpreting()["triton.language"].dtype(constant.name)
    return constant


def check_alignment():
    """Have the interpreter check addresses that kernels say are multiples of 16."""
    handle = interpreting()["triton.runtime.interpreter"].TensorHandle

    def set_attr(self, name, value):
        assert name == "tt.divisibility"
        assert (self.data % 16 == 0).all(), f"{self.data} is no multiple of 16"

    handle.set_attr = set_attr
