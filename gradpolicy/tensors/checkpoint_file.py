"""Read one file of a checkpoint: checked for damage, without running its content."""

import errno
import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradpolicy.errors import PolicyError

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


@contextmanager
def errors_named(path: Path, key: str) -> Iterator[None]:
    """Turn any error in the block into a PolicyError of one line that names the config key of the file.

    Raises:
        PolicyError: For any error.
    """
    check_kind(path, key)
    try:
        yield
    except PolicyError:
        raise
    except UnreadableError as error:
        raise PolicyError(f"{key}: {path} {' '.join(str(error).split())}") from error
    except OSError as error:
        raise PolicyError(f"{key}: {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise PolicyError(f"{key}: {path} {damage(error)}") from error


def damage(error: BaseException) -> str:
    """Return a description of a damaged file, without torch's advice to load it unsafely."""
    line = (str(error).splitlines() or [""])[0].strip()
    if not line or "weights_only" in line:
        line = type(error).__name__
    return f"is truncated or damaged, or no checkpoint ({line[:120]})"


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
