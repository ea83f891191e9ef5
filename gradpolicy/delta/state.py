"""The tensors of a model by name, and the fingerprint of each."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, nearest, shortened, shown
from gradpolicy.tensors.sharding import full_tensor, is_sharded, local_shard, shard_like
from gradpolicy.where import plain_name

State = Mapping[str, Tensor]
# The dtypes of safetensors files by their names.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
    )
}


class Print(NamedTuple):
    """The fingerprint of one tensor: a digest of its bits, its dtype and its shape."""

    digest: str
    dtype: str
    shape: tuple[int, ...]


Prints = Mapping[str, Print]


def tensors_of(model: nn.Module | State) -> dict[str, Tensor]:
    """Return the tensors of a model's state, parameters and buffers, in the order of their names.

    Raises:
        PolicyError: If a value is not a tensor, or cannot be stored.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if not isinstance(state, Mapping):
        raise PolicyError(f"delta: needs a module or a state_dict, got {type(state).__name__}")
    found = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise PolicyError(
                f"delta: {shown(name)} is a {type(tensor).__name__}; files of changes hold tensors"
            )
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            kind = "meta" if tensor.is_meta else f"{tensor.layout}".removeprefix("torch.")
            raise PolicyError(f"delta: {shown(name)} cannot be stored: it is {kind}, {tensor.dtype}")
        found[plain_name(name)] = tensor.detach()
    return dict(sorted(found.items()))


def full_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU, gathered if it is sharded."""
    return full_tensor(tensor).detach().cpu().contiguous()


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Write full values into a tensor on any device, sharded or not."""
    with torch.no_grad():
        if is_sharded(tensor):
            tensor, values = local_shard(tensor), local_shard(shard_like(values, tensor))
        tensor.copy_(values)


def print_of(tensor: Tensor) -> Print:
    """Return the fingerprint of the full tensor, on the CPU."""
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    found = hashlib.blake2b(f"{kind} {shape} ".encode(), digest_size=8)
    found.update(content_of(tensor))
    return Print(found.hexdigest(), kind, shape)


def fingerprint(prints: Prints) -> str:
    """Return the fingerprint of a state, 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(sorted(prints.items())).encode(), digest_size=8).hexdigest()


def check_same_tensors(names: Iterable[str], expected: Iterable[str], owner: str, other: str) -> None:
    """Check that two states have the same names.

    Args:
        names: The names of the first state.
        expected: The names of the second state.
        owner: The first state's name in messages.
        other: The second state's name in messages.

    Raises:
        PolicyError: If they differ; has the names, and the nearest ones.
    """
    names, expected = set(names), set(expected)
    missing, added = sorted(expected - names), sorted(names - expected)
    if missing:
        hint = nearest(missing[0], added or names, count=1)
        raise PolicyError(f"{owner} has no tensor {shortened(missing)}, which {other} has; {hint}")
    if added:
        raise PolicyError(f"{owner} has {shortened(added)}, which {other} has not")


def content_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
