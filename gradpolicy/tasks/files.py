"""Files of data sets: local or downloaded, and checked."""

from collections.abc import Mapping
from pathlib import Path

from gradpolicy.errors import PolicyError


def check_present(directory: Path, files: Mapping[str, str], download: bool) -> Path:
    """Check that the files exist, unless they will be downloaded, and return the directory.

    Raises:
        PolicyError: If one is missing and `download` is false.
    """
    missing = [name for name in files if not (directory / name).is_file()]
    if missing and not download:
        reason = f"has no {', '.join(missing)}" if directory.is_dir() else "is not a directory"
        raise PolicyError(
            f"data.data_dir: {directory} {reason}; name the right one, or set data.download=true"
        )
    return directory


def fetch(directory: Path, site: str, files: Mapping[str, str], download: bool) -> None:
    """Check the checksums of files in a directory, and download missing files.

    Args:
        directory: The directory of the files.
        site: The address of the files, with a slash at its end.
        files: The SHA-256 of each file, in hexadecimal, by its name.
        download: Download missing files, with a progress bar.

    Raises:
        PolicyError: If a file is missing and `download` is false or the download fails, or if a file has the
            wrong checksum.
    """
    # Imported here, since few runs need it and the import is slow.
    import pooch

    check_present(directory, files, download)
    store = pooch.create(directory, site, registry=dict(files), allow_updates=False)
    for name, sha256 in files.items():
        try:
            store.fetch(name, downloader=pooch.HTTPDownloader(progressbar=True, timeout=30))
        # A ValueError if the checksum is wrong.
        except (OSError, ValueError) as error:
            reason = f"has another SHA-256 than {sha256}; delete it and set data.download=true"
            if not (directory / name).is_file():
                reason = f"is missing, and {site}{name} cannot be downloaded: {error}"
            raise PolicyError(f"data.data_dir: {directory / name} {reason}") from error
