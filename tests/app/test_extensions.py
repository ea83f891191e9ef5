"""Modules that register rules of a person's own, named once."""

import sys
from pathlib import Path

import pytest

import gradpolicy as gp

RULES = """
import gradpolicy as gp
import torch

@gp.rule("ExtensionGrad")
def extension_grad(grad, inputs, output, *, factor=1.0):
    return factor * grad

def smooth_round(x):
    return x - torch.sin(2 * torch.pi * x) / (2 * torch.pi)
"""
BY_NAME = "+policy.mine={_target_: gradpolicy.UseRule, rule: ExtensionGrad, ops: [round]}"
BY_FUNCTION = (
    "+policy.mine={_target_: gradpolicy.UseRule, ops: [round], "
    "rule: {_target_: gradpolicy.gradient_of, function: extension_rules.smooth_round}}"
)
NAMED = "extensions=[extension_rules]"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "extension_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "extension_rules", raising=False)


def test_a_rule_that_nobody_imported_is_unknown_and_the_message_says_what_to_do(train) -> None:
    if "ExtensionGrad" not in gp.rule_names():
        message = train("policy=none", BY_NAME).refusal
        assert message.startswith("policy.mine.rule: unknown rule 'ExtensionGrad'")
        assert "extensions=[my_rules]" in message


def test_then_its_rules_go_by_their_names_and_errors_list_them(train) -> None:
    assert train("policy=none", BY_NAME, NAMED).completed
    assert "ExtensionGrad" in gp.rule_names()
    misspelt = BY_NAME.replace("ExtensionGrad", "ExtensionGrat")
    message = train("policy=none", misspelt, NAMED).refusal
    assert "did you mean 'ExtensionGrad'" in message
    assert "registered besides the built-in ones: " in message


def test_a_relaxation_goes_by_the_path_of_its_function(train) -> None:
    assert train("policy=none", BY_FUNCTION, "plan_only=true").completed


def test_another_operation_goes_by_its_path_and_what_is_none_does_not(train) -> None:
    sine = "+policy.mine={_target_: gradpolicy.UseRule, rule: torch.sin, ops: [round]}"
    assert train("policy=none", sine, "plan_only=true").code == 0
    refused = train("policy=none", sine.replace("torch.sin", "torch.sine")).refusal
    assert refused.startswith("policy.mine.rule: unknown operation 'torch.sine'")


def test_a_module_that_does_not_exist_is_refused(train) -> None:
    said = train("extensions=[extension_rulez]").refusal
    assert said.startswith("extensions: 'extension_rulez' cannot be imported")
