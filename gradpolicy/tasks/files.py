"""Files of a data set: found in a local directory, checked, and downloaded where that is wanted."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule

KEY = "data.data_dir"
BLOCK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file that is known by its contents.

    Attributes:
        name: Its name in the directory.
        url: Where it can be had.
        sha256: Of its contents, in hexadecimal.
    """

    name: str
    url: str
    sha256: str


class FileDataModule(DataModule):
    """A data module that reads files of a local directory.

    Args:
        files: The files.
        data_dir: Holds them, or gets them.
        batch_size: Samples a batch, on each process.
        seed: Seeds the order of the training samples.
        workers: Loader processes; 0 loads in the training process.
        download: Downloads what is absent.

    Raises:
        PolicyError: If a file is absent and not to be downloaded, or has other contents than it should.
    """

    def __init__(
        self,
        files: Sequence[RemoteFile],
        data_dir: str | Path,
        batch_size: int,
        seed: int,
        workers: int,
        download: bool,
    ) -> None:
        super().__init__(batch_size, seed, workers)
        self.files = tuple(files)
        self.data_dir = Path(data_dir)
        self.download = download
        check_present(self.data_dir, self.files, download)

    def prepare_data(self) -> None:
        """Checks the files, and downloads those that are absent if that is wanted."""
        fetch(self.data_dir, self.files, self.download)


def check_present(directory: Path, files: Sequence[RemoteFile], download: bool) -> None:
    """Checks that the files are there or are to be downloaded, without reading them.

    Raises:
        PolicyError: If one is absent and not to be downloaded.
    """
    missing = [file.name for file in files if not (directory / file.name).is_file()]
    if not missing or download:
        return
    reason = f"has no {', '.join(missing)}" if directory.is_dir() else "is not a directory"
    raise PolicyError(f"{KEY}: {directory} {reason}; name the right one, or set data.download=true")


def fetch(directory: Path, files: Sequence[RemoteFile], download: bool) -> None:
    """Makes sure that each file is in a directory, with the contents it is known by.

    Args:
        directory: Where the files are looked for and downloaded to.
        files: The files.
        download: Whether what is absent is downloaded, with a progress bar.

    Raises:
        PolicyError: If a file is absent and not to be downloaded or not to be had, or has other contents.
    """
    check_present(directory, files, download)
    for file in files:
        path = directory / file.name
        if not path.is_file():
            _download(file, path)
        elif (found := checksum(path)) != file.sha256:
            raise PolicyError(
                f"{KEY}: {path} has the SHA-256 {found} instead of {file.sha256};"
                " delete it and set data.download=true"
            )


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(file: RemoteFile, path: Path) -> None:
    """Downloads to a file beside the right one and moves it there once it is whole and checked."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
            temporary = Path(part.name)
        _copy(file, temporary)
        if (found := checksum(temporary)) != file.sha256:
            raise PolicyError(f"{file.url}: came with the SHA-256 {found} instead of {file.sha256}")
        os.replace(temporary, path)
    except (urllib.error.URLError, OSError) as error:
        cause = getattr(error, "reason", None) or error
        raise PolicyError(f"{KEY}: {path} is absent and {file.url} could not be had: {cause}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _copy(file: RemoteFile, path: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        urllib.request.urlopen(file.url, timeout=30) as source,
        path.open("wb") as target,
        Progress(*columns) as progress,
    ):
        size = int(source.headers.get("Content-Length") or 0) or None
        task = progress.add_task(file.name, total=size)
        while block := source.read(BLOCK):
            target.write(block)
            progress.advance(task, len(block))
