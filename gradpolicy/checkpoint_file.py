"""One file of a checkpoint: written with a checksum, checked for damage, read without running what is in it.

`torch.save` writes a zip archive, in which only the contents have checksums. A checksum over every byte of
the archive follows it, as the archive's comment, which readers of archives ignore.
"""

import io
import os
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from gradpolicy.errors import PolicyError

# What ends an archive without comment: a record of this size whose last two bytes are the comment's length.
_END_OF_ARCHIVE, _END_SIZE = b"PK\x05\x06", 22
_TAG = b"gradpolicy crc32 "
_COMMENT_SIZE = len(_TAG) + 8
_LENGTH = struct.pack("<H", _COMMENT_SIZE)
_BLOCK = 1 << 20


class UnreadableError(Exception):
    """Why a file is not read: a clause that follows its name."""


def save_file(content: Any, file: IO[bytes]) -> None:
    """Saves with `torch.save`, and a checksum behind it. What plain `torch.load` reads is the same.

    Args:
        content: What is saved.
        file: An empty file that is open for writing.
    """
    summed = _Summed(file)
    torch.save(content, summed)  # type: ignore[arg-type]
    # The archive ends with the length of its comment, which was 0 when the sum was taken.
    file.seek(-len(_LENGTH), 2)
    file.write(_LENGTH + _comment(summed.checksum))


def check_file(path: Path) -> bool:
    """Finds a changed bit, a missing or an added byte.

    A file of :func:`save_file` is compared with its checksum. One that plain `torch.save` wrote is compared
    with the checksums within, which cover all of its content.

    Returns:
        Whether there are checksums; torch's format of before version 1.6 has none.

    Raises:
        UnreadableError: If it is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        archive = file.read(4) == b"PK\x03\x04" or zipfile.is_zipfile(path)
        if not archive:
            return False
        tail_size = len(_LENGTH) + _COMMENT_SIZE
        file.seek(max(size - tail_size, 0))
        tail = file.read()
        if tail.startswith(_LENGTH + _TAG):
            file.seek(0)
            whole = zlib.crc32(b"\0\0", checksum(file, size - tail_size))
            if tail != _LENGTH + _comment(whole):
                raise UnreadableError("is damaged: its content differs from its checksum")
            return True
    _check_archive(path, tail)
    return True


def load_file(file: Path | io.BytesIO, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Reads tensors and plain values, and nothing else that is in the file.

    Args:
        file: The file, or its bytes.
        map_location: As that of `torch.load`.
        mmap: Leave tensors in the file until they are used, where its format allows it.

    Raises:
        UnreadableError: If it holds anything else, or cannot be understood.
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
        # torch raises errors of any kind for bytes that are no checkpoint.
        raise UnreadableError(damage(error)) from error


def read_file(path: Path, key: str) -> Any:
    """Reads a file of tensors and plain values that need not be a checkpoint.

    Raises:
        PolicyError: If it is damaged, or holds anything else.
    """
    with errors_named(path, key):
        check_file(path)
        return load_file(path)


def check_kind(path: Path, key: str) -> None:
    """Refuses a pipe, a socket or a device, which can be read without end.

    Raises:
        PolicyError: If it is there, and is neither a file nor a directory.
    """
    # Of os.path: Path.exists raises where a name is too long for the file system.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise PolicyError(f"{key}: {path} is neither a file nor a directory")


@contextmanager
def errors_named(path: Path, key: str) -> Iterator[None]:
    """Reports whatever is wrong with a file in one line, under the config key that names it.

    Raises:
        PolicyError: In place of any other error.
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
    """Describes a file that a reader failed on, without the advice of torch to read it unsafely."""
    line = (str(error).splitlines() or [""])[0].strip()
    if not line or "weights_only" in line:
        line = type(error).__name__
    return f"is truncated or damaged, or no checkpoint ({line[:120]})"


def refusal(name: str) -> str:
    """Describes a file that names something that could run."""
    return f"is not read: only tensors and plain values are, and it holds {name[:80]}"


def checksum(file: IO[bytes], size: int) -> int:
    """The CRC-32 of the next bytes of an open file."""
    found = 0
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        found, size = zlib.crc32(block, found), size - len(block)
    return found


class _Summed:
    """A file that keeps the checksum of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.checksum = file, 0

    def write(self, block: Any) -> int:
        self.checksum = zlib.crc32(block, self.checksum)
        return self.file.write(block)

    def flush(self) -> None:
        self.file.flush()


def _comment(whole: int) -> bytes:
    return _TAG + b"%08x" % whole


def _check_archive(path: Path, tail: bytes) -> None:
    end = tail[-_END_SIZE:]
    try:
        with zipfile.ZipFile(path) as archive:
            if not (end.startswith(_END_OF_ARCHIVE) and end.endswith(b"\0\0")):
                raise UnreadableError("is damaged: there are bytes behind its end")
            if min((each.header_offset for each in archive.infolist()), default=0):
                raise UnreadableError("is damaged: there are bytes before its beginning")
            broken = archive.testzip()
    except (UnreadableError, OSError):
        raise
    except Exception as error:
        # zipfile raises errors of any kind for damaged bytes.
        raise UnreadableError(damage(error)) from error
    if broken is not None:
        raise UnreadableError(f"is damaged: {broken} differs from its checksum")


def _of_pickle(error: pickle.UnpicklingError, archive: bool) -> str:
    # Torch's message goes on to advise weights_only=False, which would run what the file says.
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named or archive:
        return refusal(named[1] if named else "more than that")
    return "is no checkpoint, or it is truncated"
