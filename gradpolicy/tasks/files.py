"""Files of data sets: local or downloaded, and checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule

KEY = "data.data_dir"
# Seconds without an answer, after which a download fails.
TIMEOUT = 30


class RemoteFile(NamedTuple):
    """A file with its checksum.

    Attributes:
        name: Its name in the directory.
        url: The address for the download.
        sha256: The SHA-256 of its contents, in hexadecimal.
    """

    name: str
    url: str
    sha256: str


class FileDataModule(DataModule):
    """A data module that reads files of a local directory.

    Args:
        files: The files.
        data_dir: The directory of the files.
        batch_size: Samples per batch, on each process.
        seed: The seed of the order of the training samples.
        workers: The number of loader processes; 0 loads in the training process.
        download: Download missing files.

    Raises:
        PolicyError: If a file is missing and `download` is false, or a file has the wrong checksum.
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
        """Check the files, and download missing ones if `download` is true."""
        fetch(self.data_dir, self.files, self.download)


def check_present(directory: Path, files: Sequence[RemoteFile], download: bool) -> None:
    """Check that the files exist, unless they will be downloaded. They are not read.

    Raises:
        PolicyError: If one is missing and `download` is false.
    """
    missing = [file.name for file in files if not (directory / file.name).is_file()]
    if missing and not download:
        reason = f"has no {', '.join(missing)}" if directory.is_dir() else "is not a directory"
        raise PolicyError(f"{KEY}: {directory} {reason}; name the right one, or set data.download=true")


def fetch(directory: Path, files: Sequence[RemoteFile], download: bool) -> None:
    """Check the checksums of files in a directory, and download missing files.

    Args:
        directory: The directory of the files.
        files: The files.
        download: Download missing files, with a progress bar.

    Raises:
        PolicyError: If a file is missing and `download` is false or the download fails, or if a file has the
            wrong checksum.
    """
    # Imported here, since few runs need it and the import is slow.
    import pooch

    check_present(directory, files, download)
    downloader = pooch.HTTPDownloader(progressbar=True, timeout=TIMEOUT)
    for name, url, sha256 in files:
        path = directory / name
        if path.is_file() and (found := pooch.file_hash(path)) != sha256:
            raise PolicyError(
                f"{KEY}: {path} has the SHA-256 {found} instead of {sha256};"
                " delete it and set data.download=true"
            )
        try:
            pooch.retrieve(url, f"sha256:{sha256}", name, directory, downloader=downloader)
        # A ValueError if the checksum is wrong; the file is deleted then.
        except (OSError, ValueError) as error:
            raise PolicyError(f"{KEY}: {path} is missing, and {url} cannot be downloaded: {error}") from error
