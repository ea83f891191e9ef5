"""Data files are found, checked and fetched, and what is wrong is said by its key."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.files import RemoteFile, check_present, fetch

CONTENT = b"some data" * 1000


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteFile]:
    """A file that a server on this machine gives."""
    (tmp_path / "source").write_bytes(CONTENT)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/source"
        yield RemoteFile("data.bin", url, hashlib.sha256(CONTENT).hexdigest())
        server.shutdown()


def test_an_absent_file_is_downloaded_where_that_is_wanted(tmp_path: Path, remote: RemoteFile) -> None:
    fetch(tmp_path / "new", [remote], download=True)
    assert (tmp_path / "new" / "data.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.bin"]


def test_a_present_file_is_not_downloaded_again(tmp_path: Path, remote: RemoteFile) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT)
    (tmp_path / "source").unlink()
    fetch(tmp_path, [remote], download=True)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("folder", "reason"), [("here", "has no data.bin"), ("nowhere", "is not a directory")]
)
def test_an_absent_file_or_directory_is_named(
    tmp_path: Path, remote: RemoteFile, folder: str, reason: str
) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(PolicyError, match=f"data.data_dir: .*{folder} {reason}; .*data.download=true"):
        check_present(tmp_path / folder, [remote], download=False)


def test_a_damaged_file_is_refused(tmp_path: Path, remote: RemoteFile) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(PolicyError, match=r"data\.data_dir: .*data\.bin has the SHA-256"):
        fetch(tmp_path, [remote], download=True)


def test_a_download_of_other_contents_leaves_nothing(tmp_path: Path, remote: RemoteFile) -> None:
    (tmp_path / "source").write_bytes(b"something else")
    with pytest.raises(PolicyError, match=r"data\.data_dir: .*does not match the known hash"):
        fetch(tmp_path / "new", [remote], download=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_download_that_fails_says_what_and_why(tmp_path: Path, remote: RemoteFile) -> None:
    (tmp_path / "source").unlink()
    with pytest.raises(
        PolicyError, match=r"data\.data_dir: .*data\.bin is missing.* cannot be downloaded: 404"
    ):
        fetch(tmp_path / "new", [remote], download=True)
