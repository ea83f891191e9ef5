"""Objects and rules by their dotted paths."""

from pathlib import Path

import pytest
import torch

import gradpolicy as gp
from gradpolicy.imports import import_by_name, to_install

RULES = "def halved(grad, inputs, output):\n    return grad / 2\n"


def test_any_path_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"own_rules_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_by_name(f"{name}.halved")(4, (), None) == 2
    assert gp.get_rule(f"{name}.halved")(torch.ones(1), (), torch.ones(1)) == 0.5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("Neither `tensorboard` nor `tensorboardX` is available."),
            "needs tensorboard, which is not installed: pip install 'gradpolicy[tensorboard]'",
        ),
        (
            ModuleNotFoundError("No module named 'mlflow.entities'", name="mlflow.entities"),
            "needs mlflow, which is not installed: pip install 'gradpolicy[mlflow]'",
        ),
        (
            ModuleNotFoundError("No module named 'theirs.a'", name="theirs.a"),
            "needs theirs, which is not installed",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    error: ModuleNotFoundError, said: str
) -> None:
    assert to_install(error) == said
