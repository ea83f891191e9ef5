"""Reads weights from safetensors files and checkpoints, and writes safetensors files."""

from pathlib import Path

from torch import Tensor

from gradpolicy.delta.file import BASE_MARK, write_safetensors
from gradpolicy.delta.state import tensors_of
from gradpolicy.errors import PolicyError, brief
from gradpolicy.tensors.checkpoint_file import check_kind, read_file

ENDING = ".safetensors"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state_dict, without running code from the file.

    Args:
        path: A ``.safetensors`` file, or a file of ``torch.save`` with a state_dict or a checkpoint that has
            one as ``state_dict``, like Lightning's.

    Raises:
        PolicyError: If it cannot be read, or has no weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix != ENDING:
        found = read_file(path, "delta")
        found = found.get("state_dict", found) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise PolicyError(f"delta: {path} has no weights")
        return tensors_of(found)
    check_kind(path, "delta")
    try:
        return tensors_of(load_file(path))
    except OSError as error:
        raise PolicyError(f"delta: {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise PolicyError(f"delta: {path} is damaged: {brief(str(error))}") from error


def write_weights(path: str | Path, tensors: dict[str, Tensor], *, is_base: bool = False) -> None:
    """Write a state_dict as a safetensors file.

    Args:
        path: The file, which must not exist.
        tensors: The state_dict.
        is_base: True for the base that a run saves beside its delta, which may replace that of another run.

    Raises:
        PolicyError: If it cannot be written, has another extension, or already exists.
    """
    path = Path(path)
    if path.suffix != ENDING:
        raise PolicyError(f"delta: {path} must end with {ENDING}, the format that is written")
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        # The format does not support tensors that share memory.
        alone[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    # transformers does not read files without the name of the framework.
    metadata = {"format": "pt", **dict([BASE_MARK] if is_base else [])}
    write_safetensors(path, alone, metadata, BASE_MARK if is_base else None)
