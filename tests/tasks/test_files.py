"""Data files are found, checked and fetched, and what is wrong is said by its key."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.files import check_present, fetch

CONTENT = b"some data" * 1000
FILES = {"data.bin": hashlib.sha256(CONTENT).hexdigest()}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a server on this machine that gives the file."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "data.bin").write_bytes(CONTENT)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_an_absent_file_is_downloaded_where_that_is_wanted(tmp_path: Path, site: str) -> None:
    fetch(tmp_path / "new", site, FILES, download=True)
    assert (tmp_path / "new" / "data.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.bin"]


def test_a_present_file_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT)
    fetch(tmp_path, "http://127.0.0.1:1/", FILES, download=True)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("folder", "reason"), [("here", "has no data.bin"), ("nowhere", "is not a directory")]
)
def test_an_absent_file_or_directory_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(PolicyError, match=f"data.data_dir: .*{folder} {reason}; .*data.download=true"):
        check_present(tmp_path / folder, FILES, download=False)


def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, site: str) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(PolicyError, match=r"data\.data_dir: .*data\.bin has another SHA-256"):
        fetch(tmp_path, site, FILES, download=True)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[:-1]


def test_a_download_of_other_contents_leaves_nothing(tmp_path: Path, site: str) -> None:
    (tmp_path / "site" / "data.bin").write_bytes(b"something else")
    with pytest.raises(PolicyError, match=r"data\.data_dir: .*does not match the known hash"):
        fetch(tmp_path / "new", site, FILES, download=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_download_that_fails_says_what_and_why(tmp_path: Path, site: str) -> None:
    (tmp_path / "site" / "data.bin").unlink()
    with pytest.raises(
        PolicyError, match=r"data\.data_dir: .*data\.bin is missing.* cannot be downloaded: 404"
    ):
        fetch(tmp_path / "new", site, FILES, download=True)
