"""Read files and states of checkpoints: checked for damage, without running their content."""

import errno
import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import LARGEST_SIZE, check_integer
from gradpolicy.errors import PolicyError, shown
from gradpolicy.tensors.sharding import shard_like

# The end of an archive without comment: a record of this size whose last two bytes are the comment's length.
_END_OF_ARCHIVE, _END_SIZE = b"PK\x05\x06", 22


class UnreadableError(Exception):
    """Raised for a file that cannot be read; its message is a clause that follows the file's name."""


def check_file(path: Path) -> bool:
    """Compare a file with the checksums of its contents that `torch.save` has written into it.

    Returns:
        True if there are checksums; torch's format of before version 1.6 has none.

    Raises:
        UnreadableError: If it is damaged.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04" and not zipfile.is_zipfile(path):
            return False
        file.seek(max(path.stat().st_size - _END_SIZE, 0))
        end = file.read()
    try:
        with zipfile.ZipFile(path) as archive:
            if not (end.startswith(_END_OF_ARCHIVE) and end.endswith(b"\0\0")):
                raise UnreadableError("is damaged: there are bytes after its end")
            if min((each.header_offset for each in archive.infolist()), default=0):
                raise UnreadableError("is damaged: there are bytes before its beginning")
            broken = archive.testzip()
    except (UnreadableError, OSError):
        raise
    except Exception as error:
        # For damaged bytes zipfile raises various errors.
        raise UnreadableError(damage(error)) from error
    if broken is not None:
        raise UnreadableError(f"is damaged: {broken} differs from its checksum")
    return True


def load_file(file: Path | io.BytesIO, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read a file of tensors and plain values.

    Args:
        file: The file, or its bytes.
        map_location: As for `torch.load`.
        mmap: Map tensors into memory instead of reading them, if the file's format allows it.

    Raises:
        UnreadableError: If it contains anything else, or is invalid.
    """
    archive = zipfile.is_zipfile(file)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        with warnings.catch_warnings():
            # That another program wrote it; what cannot be read is refused anyway.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap and archive)
    except pickle.UnpicklingError as error:
        raise UnreadableError(_of_pickle(error, archive)) from error
    except Exception as error:
        # torch raises various errors for bytes that are not a checkpoint.
        raise UnreadableError(damage(error)) from error


def read_file(path: Path, key: str) -> Any:
    """Read a file of tensors and plain values that need not be a checkpoint.

    Raises:
        PolicyError: If it is damaged, or contains anything else.
    """
    with errors_named(path, key):
        check_file(path)
        return load_file(path)


def check_kind(path: Path, key: str) -> None:
    """Refuse a pipe, a socket or a device, which can be read without end.

    Raises:
        PolicyError: If it exists, and is neither a file nor a directory.
    """
    # Not Path.exists, which raises if a name is too long for the file system.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise PolicyError(f"{key}: {path} is neither a file nor a directory")


def errors_named(path: Path, key: str) -> AbstractContextManager[None]:
    """Return a block in which any error becomes a PolicyError that names the config key of the file."""
    check_kind(path, key)
    return reading(f"{key}: {path}")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn any error in the block into a PolicyError of one line.

    Args:
        what: What is read, with which the line begins.

    Raises:
        PolicyError: For any error.
    """
    try:
        yield
    except (PolicyError, torch.OutOfMemoryError):
        raise
    except UnreadableError as error:
        raise PolicyError(f"{what} {' '.join(str(error).split())}") from error
    except OSError as error:
        raise PolicyError(f"{what} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise PolicyError(f"{what} {damage(error)}") from error


def damage(error: BaseException) -> str:
    """Return a description of a damaged file, without torch's advice to load it unsafely."""
    line = (str(error).splitlines() or [""])[0].strip()
    is_clear = line and "weights_only" not in line and isinstance(error, RuntimeError | ValueError | EOFError)
    return "is truncated or damaged, or no checkpoint" + (f" ({line[:120]})" if is_clear else "")


def restored(what: str, saved: Any, like: Any, parameters: Mapping[str, Tensor], name: str = "") -> Any:
    """Return a saved state with its tensors where their parameters are, if it is made as another one is.

    Args:
        what: The state in the message.
        saved: Containers of integers, of numbers or None, and of tensors by parameter name. Tensors have one
            value for an entry or row, or are packed. Numbers in the parameter's shape are sharded like it;
            masks, and other shapes, remain full.
        like: A state with 0 where the saved one has an integer, and None where it has a number or None. A
            mapping may have more keys.
        parameters: The parameters by name.
        name: The name of a tensor.

    Raises:
        PolicyError: If it is not.
    """
    if isinstance(saved, Tensor) and name in parameters and _fits(saved, parameters[name]):
        is_like = saved.shape == parameters[name].shape and (saved.is_floating_point() or saved.is_complex())
        return shard_like(saved, parameters[name]) if is_like else saved.to(parameters[name].device)
    if isinstance(saved, Mapping) and isinstance(like, Mapping | None) and not set(like or ()) - saved.keys():
        known = like or {}
        return {
            key: restored(f"{what}.{key}", each, known.get(key), parameters, key)
            for key, each in saved.items()
        }
    if isinstance(saved, list) and (like is None or (isinstance(like, list) and len(saved) == len(like))):
        pairs = zip(saved, like or [0] * len(saved), strict=True)
        return [restored(what, each, one, parameters) for each, one in pairs]
    if isinstance(like, int):
        return check_integer(what, saved, least=-1, most=LARGEST_SIZE)
    if like is None and (saved is None or isinstance(saved, int | float)):
        return saved
    raise PolicyError(f"{what}: expected a state like {shown(like)}, got {shown(saved)}")


def form_of(tensor: Tensor) -> str:
    """Return the shape of a tensor; its layout and kind too unless it is dense and floating-point."""
    layout = "" if tensor.layout is torch.strided else f" in {tensor.layout}"
    kind = "" if tensor.is_floating_point() else " of integers"
    return f"{tuple(tensor.shape)}{layout}{' of complex numbers' if tensor.is_complex() else kind}"


def _fits(saved: Tensor, parameter: Tensor) -> bool:
    """Return True if a tensor broadcasts to a parameter, or is packed."""
    shapes = zip(reversed(saved.shape), reversed(parameter.shape), strict=False)
    broadcasts = saved.dim() <= parameter.dim() and all(size in (1, full) for size, full in shapes)
    return broadcasts or (saved.dtype in (torch.uint8, torch.int32) and saved.dim() == 1)


def could_not_save(path: Path, error: BaseException) -> OSError:
    """Return the error for a checkpoint that could not be saved; it names the newest remaining one.

    Args:
        path: The checkpoint.
        error: The error. torch.save reports a failed write as another error, caused by an OSError.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    number = errno.EIO if cause is None or cause.errno is None else cause.errno
    reason = os.strerror(number) if number != errno.EIO else (str(error) or type(error).__name__)
    left = sorted(path.parent.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    hint = "there is no former checkpoint"
    if left:
        hint = f"the former {left[-1].name} is complete: make room and resume from it (ckpt_path=last)"
    return OSError(number, f"could not save {path}: {reason.splitlines()[0]}; {hint}")


def _of_pickle(error: pickle.UnpicklingError, archive: bool) -> str:
    # Torch's message also advises weights_only=False, which would run code from the file.
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named or archive:
        held = named[1][:80] if named else "more than that"
        return f"is not read: only tensors and plain values are, and it holds {held}"
    return "is no checkpoint, or it is truncated"
