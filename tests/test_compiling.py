"""C sources are compiled once, and are never a condition for running."""

import shutil
from pathlib import Path

import pytest

from gradpolicy.compiling import compiled

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
SOURCE = "int gradpolicy_twice(int x) { return 2 * x; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADPOLICY_NATIVE", raising=False)
    (tmp_path / "twice.c").write_text(SOURCE)
    return tmp_path / "twice.c"


def libraries(source: Path) -> list[Path]:
    return list((source.parent / "cache" / "gradpolicy").glob("*.so"))


def test_a_source_is_compiled_once_and_again_when_it_changes(source: Path) -> None:
    library = compiled(source, "first")
    assert library is not None
    assert library.gradpolicy_twice(21) == 42
    (first,) = libraries(source)
    stamp = first.stat().st_mtime_ns
    compiled(source, "second")
    assert first.stat().st_mtime_ns == stamp
    source.write_text(SOURCE.replace("2 *", "3 *"))
    changed = compiled(source, "third")
    assert changed is not None
    assert changed.gradpolicy_twice(21) == 63
    assert len(libraries(source)) == 2


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("GRADPOLICY_NATIVE", "0", "GRADPOLICY_NATIVE=0"), ("CC", "/nowhere/cc", "/nowhere/cc failed")],
)
def test_what_cannot_be_compiled_is_said_once(source: Path, monkeypatch, variable, value, reason) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.warns(UserWarning, match=f"it takes longer .*{reason}"):
        assert compiled(source, "it takes longer") is None


def test_an_error_in_a_source_is_no_error_of_the_run(source: Path) -> None:
    source.write_text("int gradpolicy_twice(")
    with pytest.warns(UserWarning, match="failed"):
        assert compiled(source, "it takes longer") is None
    assert libraries(source) == []
