"""What the tests of the documentation share."""

from pathlib import Path

import pytest

from tests.docs.markdown import DOCS


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, notebooks executed; a warning is an error."""
    from sphinx.cmd.build import main

    folder = tmp_path_factory.mktemp("site")
    quiet = ["--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", str(folder / "doctrees")]
    assert main([*quiet, str(DOCS), str(folder / "html")]) == 0
    return folder / "html"
