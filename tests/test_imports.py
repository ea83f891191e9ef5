"""What a dotted path may lead to."""

import sys
from pathlib import Path

import pytest
import torch

import gradpolicy as gp
from gradpolicy.imports import allowed_packages, import_by_name, is_limited, limited_to, to_install

RULES = "import os\nfrom os.path import join\n\ndef halved(grad, inputs, output):\n    return grad / 2\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's own, not yet imported."""
    name = f"own_rules_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_in_python_any_path_is_followed(package: str) -> None:
    assert not is_limited()
    assert import_by_name(f"{package}.halved")(4, (), None) == 2
    assert gp.get_rule(f"{package}.halved")(torch.ones(1), (), torch.ones(1)) == 0.5


def test_a_limit_holds_for_a_block_and_no_longer() -> None:
    with limited_to(["mine"]):
        with limited_to(["other"]):
            assert allowed_packages() == ("other",)
        assert allowed_packages() == ("mine",)
    assert not is_limited()


def test_within_a_limit_a_module_that_is_not_allowed_is_not_even_imported(package: str) -> None:
    with limited_to(()), pytest.raises(gp.PolicyError, match=rf"allowed_targets=\[{package}\]"):
        gp.UseRule(f"{package}.halved", ops=["floor"])
    assert package not in sys.modules


def test_within_a_limit_a_rule_of_an_allowed_package_is_found(package: str) -> None:
    with limited_to([package]):
        assert gp.get_rule(f"{package}.halved")(torch.ones(1), (), torch.ones(1)) == 0.5
        with pytest.raises(gp.PolicyError, match="not allowed"):
            gp.get_rule(f"{package}.join")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("os.system", "not allowed"),
        ("gradpolicy.launch.app.main", "not allowed"),
        ("torch.save", "unknown operation"),
        ("torch.load", "unknown operation"),
        ("torch.utils.cpp_extension.load", "unknown operation"),
    ],
)
def test_within_a_limit_a_known_package_gives_no_rules_but_registered_ones_and_operations(
    path: str, reason: str
) -> None:
    with limited_to(()):
        assert gp.get_rule("gradpolicy.rules.passing.identity") is gp.get_rule("identity")
        with pytest.raises(gp.PolicyError, match=reason):
            gp.StraightThrough(path, ops=["round"])


def test_within_a_limit_module_classes_come_from_known_and_allowed_packages(package: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with limited_to(()):
        gp.install(model, [gp.Scale(0.5, modules="torch.nn.ReLU")]).remove()
        with pytest.raises(gp.PolicyError, match=rf"allowed_targets=\[{package}\]"):
            gp.install(model, [gp.Scale(0.5, modules=f"{package}.Layer")])
    assert package not in sys.modules


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
            "needs theirs, which is not installed: pip install theirs",
        ),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    error: ModuleNotFoundError, said: str
) -> None:
    assert to_install(error) == said
