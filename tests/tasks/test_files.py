"""Data files are found, checked and fetched, and what is wrong is said by its key."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import check_present, fetch

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


def test_an_absent_file_is_downloaded_once_where_that_is_wanted(tmp_path: Path, site: str) -> None:
    fetch(tmp_path / "new", site, FILES, download=True)
    fetch(tmp_path / "new", "http://127.0.0.1:1/", FILES, download=True)
    assert (tmp_path / "new" / "data.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.bin"]


@pytest.mark.parametrize(
    ("folder", "reason"), [("here", "has no data.bin"), ("nowhere", "is not a directory")]
)
def test_an_absent_file_or_directory_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(PolicyError, match=f"data.data_dir: .*{folder} {reason}; .*data.download=true"):
        check_present(tmp_path / folder, FILES, download=False)


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        (CONTENT[:-1], CONTENT, "has another SHA-256"),
        (None, b"something else", "is missing.* does not match the known hash"),
        (None, None, "is missing.* cannot be downloaded: 404"),
    ],
)
def test_a_wrong_file_is_refused_and_kept_and_none_is_made(
    tmp_path: Path, site: str, here: bytes | None, there: bytes | None, reason: str
) -> None:
    for path, content in ((tmp_path / "data.bin", here), (tmp_path / "site/data.bin", there)):
        path.write_bytes(content) if content else path.unlink(missing_ok=True)
    with pytest.raises(PolicyError, match=rf"data\.data_dir: .*data\.bin {reason}"):
        fetch(tmp_path, site, FILES, download=True)
    assert [path.read_bytes() for path in tmp_path.glob("*.bin")] == ([here] if here else [])
