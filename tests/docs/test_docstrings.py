import doctest
import importlib
from pathlib import Path

import pytest

import gradpolicy

ROOT = Path(gradpolicy.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_examples_run(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
