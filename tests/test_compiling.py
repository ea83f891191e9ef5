"""C sources are compiled once, and are never a condition for running."""

import os
import shutil
from pathlib import Path

import pytest

from gradpolicy import compiling
from gradpolicy.compiling import compiled

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
SOURCE = "int gradpolicy_twice(int x) { return 2 * x; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADPOLICY_NATIVE", raising=False)
    monkeypatch.setattr(compiling, "_said", [])
    (tmp_path / "twice.c").write_text(SOURCE)
    return tmp_path / "twice.c"


def libraries(source: Path) -> list[Path]:
    return list((source.parent / "cache" / "gradpolicy").glob("*.so"))


def test_a_source_is_compiled_once_and_again_when_it_changes(source: Path) -> None:
    assert compiled(source).gradpolicy_twice(21) == 42
    (first,) = libraries(source)
    stamp = first.stat().st_mtime_ns
    compiled(source)
    assert first.stat().st_mtime_ns == stamp
    source.write_text(SOURCE.replace("2 *", "3 *"))
    assert compiled(source).gradpolicy_twice(21) == 63
    assert len(libraries(source)) == 2


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("GRADPOLICY_NATIVE", "0", "GRADPOLICY_NATIVE=0"), ("CC", "/nowhere/cc", "/nowhere/cc failed")],
)
def test_what_cannot_be_compiled_is_said_once(source: Path, monkeypatch, variable, value, reason) -> None:
    monkeypatch.setenv(variable, value)
    other = source.with_name("other.c")
    other.write_text(SOURCE)
    with pytest.warns(UserWarning, match=f"plain torch operations.*{reason}") as warnings:
        assert compiled(source) is compiled(other) is None
    assert len(warnings) == 1


def test_an_error_in_a_source_is_no_error_of_the_run(source: Path) -> None:
    source.write_text("int gradpolicy_twice(")
    with pytest.warns(UserWarning, match="failed"):
        assert compiled(source) is None
    assert libraries(source) == []


def test_no_library_is_run_from_a_folder_that_others_can_write_to(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(source.parent))
    for folder in (source.parent / "cache" / "gradpolicy", source.parent / f"gradpolicy-{os.getuid()}"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    assert compiled(source) is not None
    (library,) = source.parent.glob("**/*.so")
    assert library.parent.stat().st_mode & 0o777 == 0o700
