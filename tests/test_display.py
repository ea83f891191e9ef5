"""Plans, reports and pictures look the same printed, in rich's consoles, and in notebooks."""

import json

import pytest
import torch
from rich.console import Console
from torch import nn

import gradpolicy as gp


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def loss(copy: nn.Module) -> torch.Tensor:
    return copy(torch.ones(1, 4)).sum()


CUT = {"<cut>": gp.Stop(modules="[2]")}


@pytest.mark.parametrize(
    "make",
    [
        lambda: gp.plan(model(), CUT, loss),
        lambda: gp.install(model(), CUT),
        lambda: gp.install(model(), CUT).report(),
    ],
    ids=["plan", "installed", "report"],
)
def test_each_result_is_text_in_a_console_and_html_in_a_notebook(make) -> None:
    result = make()
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(result)
    assert "<cut>" in captured.get()
    assert "<cut>" in str(result)
    html = result._repr_html_()
    assert "<cut>" not in html
    assert "&lt;cut&gt;" in html


def test_a_plan_takes_policies_of_both_families_in_a_list() -> None:
    plan = gp.plan(model(), [gp.Guided(), gp.Freeze(False, params="0.*")], loss)
    assert [row.name for row in plan.rows] == ["guided", "freeze"]


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (gp.Guided(), "plan takes a list or dict of policies, not one policy"),
        ({"cut": "stop"}, "policy 'cut': must be a gradient policy, got 'stop'"),
    ],
)
def test_what_is_no_policy_is_refused(policies: object, message: str) -> None:
    with pytest.raises(gp.PolicyError) as raised:
        gp.plan(model(), policies, loss)
    assert str(raised.value) == message


def test_a_plan_as_plain_values_names_what_each_policy_matched() -> None:
    policies = {"cut": gp.Stop(modules="2"), "half": gp.Freeze(gp.masks.Random(0.5), params="2.*")}
    given = json.loads(json.dumps(gp.plan(model(), policies, loss).to_dict()))
    cut, half = given["rows"]
    assert (cut["name"], cut["policy"], cut["what"], cut["matched"]) == ("cut", "Stop", "Stop", ["2"])
    assert (half["what"], half["parameters"]) == ("Freeze · Random", ["2.weight", "2.bias"])
    assert (half["entries"], half["active_entries"]) == (10, 5)
    assert half["remarks"][0].startswith("half: Random(")
    assert given["without_gradient"] == ["0.weight", "0.bias"]
    assert (given["entries"], given["training_entries"]) == (30, 5)
