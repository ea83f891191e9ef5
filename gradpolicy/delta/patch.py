"""Patches of the entries that a step may have changed, as its masks say.

A file has ``gaps:NAME`` and ``values:NAME`` of each tensor, as a delta, and shapes as JSON in its metadata. A
patch does not know the weights that it belongs to: apply patches in the order of their steps.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.checks import check_integer
from gradpolicy.delta.change import decode, encode
from gradpolicy.delta.file import compact, is_shape, read_as, table, write_as, write_safetensors
from gradpolicy.delta.state import State, content_of, full_cpu, tensors_of
from gradpolicy.errors import PolicyError, shown, under, unknown
from gradpolicy.files import write_text
from gradpolicy.imports import to_install
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import wrapper_of
from gradpolicy.optim.optimizers import innermost
from gradpolicy.tensors.sharding import full_tensor, is_composed, write_entries
from gradpolicy.where import named_parameters, once_each

FORMAT = "gradpolicy.patch 1"
MOST_ENTRIES = 2**31


class Patch(dict[str, tuple[Tensor, Tensor]]):
    """Flat indices (int32, ascending) and the new values at them, by the name of the parameter.

    Args:
        entries: The indices and values.
        shapes: The full shape of each parameter.
    """

    def __init__(
        self, entries: Mapping[str, tuple[Tensor, Tensor]], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(entries)
        self.shapes = {name: tuple(shapes[name]) for name in entries}


@torch.no_grad()
def patch(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], model: nn.Module) -> Patch:
    """Return what the last step may have changed: the active entries of the model's parameters.

    Call it after ``step()`` and before the next forward pass, which sets other masks. Entries are known from
    the masks, and nothing is compared. All entries of a parameter are included if it has no mask, or if a
    mask source may have written to it as the update began (``PruneAndGrow``, ``Phases`` with ``best``).

    Args:
        optimizer: The optimizer of :func:`gradpolicy.training` or a MaskedOptimizer, or a list of several.
        model: The model; names are those of its ``named_parameters``, of a tied tensor the first. If it is
            sharded, every process must call this.

    Returns:
        By name the flat indices (int32, ascending) and the values at them, on the parameter's device.

    Raises:
        PolicyError: If an optimizer takes no masks, has not stepped under its present ones, has no parameter
            of the model, or has one of more than 2^31 entries or one that is made up of other tensors.

    Example:
        >>> model = nn.Linear(4, 2, bias=False)
        >>> optimizer = MaskedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.set_mask(model.weight, torch.tensor([[True], [False]]))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> patch(optimizer, model)["weight"][0]
        tensor([0, 1, 2, 3], dtype=torch.int32)
    """
    named = once_each(named_parameters(model))
    entries: dict[str, tuple[Tensor, Tensor]] = {}
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        masked = _stepped(each)
        optimized = {id(p) for group in masked.param_groups for p in group["params"]}
        found = {name: p for name, p in named.items() if id(p) in optimized}
        if not found:
            raise PolicyError(f"delta.patch: the model has no parameter of {type(masked.inner).__name__}")
        for name, parameter in found.items():
            if parameter.numel() > MOST_ENTRIES or is_composed(parameter):
                kind = f"a {type(parameter).__name__} with {parameter.numel():,} entries"
                raise PolicyError(f"delta.patch: {name} is {kind}; expected a plain tensor of at most 2^31")
            if not (parameter.requires_grad or parameter.grad is not None):
                continue
            mask = full_tensor(masked.get_mask(parameter))
            mask = torch.ones_like(mask) if parameter in masked.written else mask
            indices = mask.expand(parameter.shape).reshape(-1).nonzero().flatten()
            if len(indices):
                values = full_tensor(parameter.detach()).reshape(-1)[indices]
                entries[name] = indices.to(torch.int32), values
    return Patch(entries, {name: tuple(parameter.shape) for name, parameter in named.items()})


def _stepped(optimizer: Any) -> MaskedOptimizer:
    """Return the masked optimizer, which has stepped under its masks."""
    inner = innermost(optimizer)
    masked = wrapper_of(inner) or inner
    if not isinstance(masked, MaskedOptimizer) or masked.is_partitioned:
        raise PolicyError(
            f"delta.patch: expected what gradpolicy.training returns, got {type(inner).__name__}"
        )
    if masked.effective_steps == masked.masks_set_at:
        raise PolicyError(
            f"delta.patch: {type(masked.inner).__name__} has taken no step under its present masks; call it "
            "after step(), before the next forward pass (a step that mixed precision skips changes nothing)"
        )
    return masked


# ---- apply


@torch.no_grad()
def apply_patch(model: nn.Module | State, patch: Patch | str | Path) -> None:
    """Write the values of a patch into a model, in place and bit for bit; nothing if it does not fit.

    Args:
        model: The weights before the step, as a module or a state_dict. If it is sharded, every process must
            call this.
        patch: A patch, or the path of its file.

    Raises:
        PolicyError: If the model has no such tensor, or one of another shape or dtype, or indices are not
            ascending, distinct and in range.
    """
    tensors = tensors_of(model)
    patch = _checked(patch) if isinstance(patch, Patch) else load_patch(patch)
    for name, (_, values) in patch.items():
        if name not in tensors:
            raise unknown("tensor", name, tensors, key="delta.apply_patch")
        found, given = (tensors[name].dtype, tuple(tensors[name].shape)), (values.dtype, patch.shapes[name])
        if found != given:
            raise PolicyError(f"delta.apply_patch: {name} is {found} in the model, and {given} in the patch")
    for name, (indices, values) in patch.items():
        device = tensors[name].device
        write_entries(tensors[name], indices.to(device, torch.int64), values.to(device))


def _checked(patch: Patch) -> Patch:
    """Return a patch whose indices are 1-D, ascending, distinct and in range, with a value for each.

    Raises:
        PolicyError: If they are not.
    """
    for name, (indices, values) in patch.items():
        ascending = indices.dim() == 1 and bool((indices.diff() > 0).all())
        inside = not len(indices) or (indices[0] >= 0 and indices[-1] < math.prod(patch.shapes[name]))
        if not (ascending and inside and indices.shape == values.shape):
            raise PolicyError(
                f"delta: patch of {shown(name)}: expected distinct ascending indices, a value for each"
            )
    return patch


# ---- files


def save_patch(path: str | Path, patch: Patch) -> None:
    """Write a patch to a safetensors file, completely or not at all.

    Args:
        path: The file, which must not exist.
        patch: The patch.

    Raises:
        PolicyError: If its indices are invalid, or the file exists or cannot be written.
    """
    tensors = {f"gaps:{name}": encode(each.cpu().long()) for name, (each, _) in _checked(patch).items()}
    tensors |= {f"values:{name}": values.cpu().contiguous() for name, (_, values) in patch.items()}
    write_as(path, tensors, {"format": FORMAT, "shapes": compact(patch.shapes)}, None)


def load_patch(path: str | Path) -> Patch:
    """Read a patch from a file of :func:`save_patch`, which may be untrusted.

    Raises:
        PolicyError: If it cannot be read, is no patch, or is damaged.
    """
    return read_as(path, FORMAT, _read)


def _read(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Patch:
    shapes = table(metadata, "shapes")
    if tensors.keys() != {f"{kind}:{name}" for name in shapes for kind in ("gaps", "values")}:
        raise ValueError("its tensors are not those of its shapes")
    entries = {}
    for name, shape in shapes.items():
        if not is_shape(shape) or math.prod(shape) > MOST_ENTRIES:
            raise ValueError(f"{shown(name)} has the shape {shown(shape)}")
        with under(shown(name)):
            indices = decode(tensors[f"gaps:{name}"], math.prod(shape)).to(torch.int32)
        entries[name] = indices, tensors[f"values:{name}"]
    return _checked(Patch(entries, shapes))


# ---- inference engines


def to_vllm(patch: Patch) -> list[tuple[str, Tensor, Tensor, tuple[int, ...]]]:
    """Return a patch in the form that vLLM's sparse weight transfer takes (``send_weights``).

    Returns:
        The fields of vLLM's ``SparseWeightPatch`` of each parameter: name, indices, values and full shape.

    Raises:
        PolicyError: If a value is NaN, with which vLLM marks entries that stay, or is no floating number.
    """
    for name, (_, values) in patch.items():
        if not values.is_floating_point() or bool(values.isnan().any()):
            raise PolicyError(f"delta.to_vllm: {name} has NaN or {values.dtype}; expected floats without NaN")
    return [(name, *entries, patch.shapes[name]) for name, entries in patch.items()]


def to_sglang(patch: Patch, model: nn.Module | State, directory: str | Path, version: int) -> Path:
    """Write a patch as a version directory that SGLang's ``/pull_weights`` applies to a checkpoint.

    Args:
        patch: The patch.
        model: The weights after the step, of the checkpoint's names and dtypes; their checksums are stored.
        directory: The ``source_dir``, in which ``weight_vNNNNNN`` is created.
        version: The version that results; it is applied to the one before.

    Returns:
        The new directory.

    Raises:
        PolicyError: If zstandard is not installed, the version exists, or a tensor is missing or too large.
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise PolicyError(f"delta.to_sglang: {to_install(error)}") from error
    check_integer("delta.to_sglang.version", version, least=1)
    tensors, blobs, checksums = tensors_of(model), {}, {}
    for name, (indices, values) in _checked(patch).items():
        if name not in tensors or tensors[name].nbytes > 2**32:
            raise PolicyError(f"delta.to_sglang: {name} is not in the model, or is larger than 4 GiB")
        size = values.element_size()
        places = (indices.cpu().long()[:, None] * size + torch.arange(size)).flatten().numpy().astype("<u4")
        count = len(places).to_bytes(4, "little")
        content = b"".join([count, places.tobytes(), bytes(content_of(values.cpu()))])
        packed = zstandard.ZstdCompressor().compress(content)
        blobs[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        checksums[name] = f"{zlib.adler32(content_of(full_cpu(tensors[name]))):08x}"
    folder, file = Path(directory) / f"weight_v{version:06d}", "model-00001-of-00001.safetensors"
    if folder.exists():
        raise PolicyError(f"delta.to_sglang: {folder} is there already")
    folder.mkdir(parents=True)
    if blobs:
        write_safetensors(folder / file, blobs, checksums, None)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    # Last, as a reader takes the version once its index is there.
    index = {"metadata": metadata, "weight_map": dict.fromkeys(blobs, file)}
    write_text(folder / "model.safetensors.index.json", compact(index))
    return folder
