"""The moves that masks need, by Triton kernels on a GPU; `triton_adam` runs the updates.

The kernels are compiled at their first use. Where Triton is missing, or cannot compile for the device, torch
operations do the work instead, which is said once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradpolicy.compiling import SWITCH

DEVICES = {"cuda", "xpu"}
"""Kinds of device whose builds of torch bring Triton."""
WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""
_refused: set[torch.device] = set()


@functools.cache
def kernels() -> ModuleType | None:
    """The kernels; None, and one warning, where there is no Triton."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        from gradpolicy.optim import triton_kernels
    except ImportError as error:
        _say(f"Triton cannot be imported: {error}")
        return None
    return triton_kernels


def _say(reason: str) -> None:
    warnings.warn(
        f"gradpolicy: masked updates on the GPU run on plain torch operations ({reason[:300]})", stacklevel=2
    )


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    device = tensors[0].device
    if device.type not in DEVICES or device in _refused or kernels() is None:
        return False
    return all(tensor.is_contiguous() and tensor.device == device for tensor in tensors)


def launch(name: str, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel; False, and one warning, where it cannot be compiled for the device."""
    if not programs:
        return True
    try:
        with _current(device):
            getattr(kernels(), name)[(programs,)](*arguments, **constants)
    except Exception as error:  # compilers fail in many ways, before anything is written
        _refused.add(device)
        _say(f"{type(error).__name__}: {error}")
        return False
    return True


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within, kernels are launched on this device."""
    if device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for the work that it has."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def tile() -> int:
    """Entries between two stored counts of held ones."""
    module = kernels()
    assert module is not None
    return int(module.TILE.value)


def _wide(count: int) -> int:
    module = kernels()
    assert module is not None
    return -(-count // int(module.WIDE.value))


def _whole(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return tensor.view(WIDTHS[tensor.element_size()])


def recode(codes: Tensor, mask: Tensor, table: Tensor) -> Tensor | None:
    """`cohorts.recode`, in place where codes keep their width; None where the kernel cannot do it."""
    count, device = codes.numel(), codes.device
    if not 1 < count == mask.numel() or not serves(codes, mask):
        return None
    result = codes if codes.dtype is table.dtype else torch.empty_like(codes, dtype=table.dtype)
    by_code = upload(table.reshape(-1), device)
    flags, bits = mask.view(torch.uint8), 8 * codes.element_size()
    arguments = (codes, flags, by_code, result, count, table.shape[-1])
    return result if launch("recode", _wide(count), device, *arguments, OLD_BITS=bits) else None


def clear(flat: Tensor, active: Tensor, block: int) -> bool:
    """Zero entries of blocks that are not active (flags, or codes); False where the kernel cannot do it."""
    if flat.element_size() not in WIDTHS or flat.is_complex() or not serves(flat, active):
        return False
    below_zero, count = active.dtype is not torch.bool, flat.numel()
    flags = active if below_zero else active.view(torch.uint8)
    programs = -(-count // tile())
    constants = {"BELOW_ZERO": below_zero, "SINGLE": block == 1}
    return launch("clear_frozen", programs, flat.device, _whole(flat), flags, count, block, **constants)


def survey(flags: Tensor, known: Tensor | None, packed: bool = False) -> tuple[int, int] | None:
    """How many flags are set, and how many differ from what is in force, for one wait of the device.

    Args:
        flags: bool, one an entry.
        known: codes, or with `packed` bits; None: nothing is compared.
        packed: see `known`.
    """
    if not serves(flags) or (known is not None and not serves(known)):
        return None
    result = torch.zeros(2, dtype=torch.int64, device=flags.device)
    arguments = (flags.view(torch.uint8), flags if known is None else known, result, flags.numel())
    constants = {"PACKED": packed, "COMPARED": known is not None}
    if not launch("survey", _wide(flags.numel()), flags.device, *arguments, **constants):
        return None
    count, differing = result.tolist()
    return count, differing


def bits(flags: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flags, or codes below 0, as bits, and how many in each `tile()`; None where no kernel can do it."""
    if not serves(flags):
        return None
    below_zero, count = flags.dtype is not torch.bool, flags.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=flags.device)
    counts = torch.empty(-(-count // tile()), dtype=torch.int64, device=flags.device)
    values = flags if below_zero else flags.view(torch.uint8)
    arguments = (values, packed, counts, count)
    done = launch("pack_bits", counts.numel(), flags.device, *arguments, BELOW_ZERO=below_zero)
    return (packed, counts) if done else None


def repack(
    old: tuple[Tensor, Tensor] | None,
    new: tuple[Tensor, Tensor] | None,
    values: Tensor,
    result: Tensor,
    size: int,
    newcomer: int = 0,
) -> bool:
    """Move values between sets of held entries; see `native.repack`. The two must not share memory."""
    if values.element_size() not in WIDTHS or values.is_complex() or not serves(values, result):
        return False
    index = [*(old or (values, values)), *(new or (values, values))]
    arguments = (*index, _whole(values), _whole(result), size, newcomer)
    constants = {"FROM_ALL": old is None, "TO_ALL": new is None}
    return launch("move", -(-size // tile()), values.device, *arguments, **constants)
