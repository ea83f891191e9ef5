"""The schedule that `gradpolicy plan` writes: each phase adds a layer, whatever the names."""

from pathlib import Path

import pytest
import yaml
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.planning.schedule import write_schedule
from gradpolicy.where import match_names


class Transformer(nn.Module):
    """A parameter of the model itself lies beside its layers, as a ViT's positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(nn.Linear(2, 2).weight.detach().clone())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)


def test_each_phase_adds_a_layer_from_the_last_to_the_first(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("net", Transformer())
    write_schedule(model, tmp_path / "conf" / "slow.yaml")
    (policy,) = yaml.safe_load((tmp_path / "conf" / "slow.yaml").read_text()).values()
    phases = policy["mask"]["phases"]
    names = [name for name, _ in model.named_parameters()]
    training = [set(match_names(each["params"], names, "parameter")) for each in phases]
    added = [now - before for before, now in zip([set(), *training], training, strict=False)]
    assert [{name.split(".")[1] for name in each} for each in added] == [
        {"norm", "head"},
        {"blocks"},
        {"blocks"},
        {"positions"},
    ]
    assert [len(each) for each in added] == [4, 4, 4, 1]
    assert [each.get("until") for each in phases] == [{"epochs": 1}] * 3 + [None]
    gp.masks.Phases(phases).setup(dict(model.named_parameters()), seed=0)


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "edited.yaml"
    file.write_text("mine: 1\n")
    with pytest.raises(PolicyError, match=r"--write-schedule: .*is there already"):
        write_schedule(Transformer(), file)
    assert file.read_text() == "mine: 1\n"
