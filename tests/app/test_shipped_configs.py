"""Every config that a project of its own can choose is built by Hydra alone, from ``pkg://gradpolicy.conf``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule
from omegaconf import DictConfig
from torch import nn

from gradpolicy import Freeze, GradientPolicies, Guided, When, install
from gradpolicy.policies import Policy

from .conftest import CONF

PRIMARY = """
defaults:
  - policy: [guided, random_freeze]
  - _self_
hydra:
  searchpath: [pkg://gradpolicy.conf]
"""


@pytest.fixture
def own_project(tmp_path: Path) -> Iterator[None]:
    """A project with one config of its own, which knows nothing of this project's others."""
    (tmp_path / "config.yaml").write_text(PRIMARY)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(group: str, name: str) -> DictConfig:
    overrides = [f"{group}={name}"] if group == "policy" else [f"+{group}={name}"]
    return compose("config", overrides).get(group) or DictConfig({})


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("callbacks", "model", "policy") for name in names(group)]
)
@pytest.mark.filterwarnings("ignore:callbacks.initial_weights.path names no checkpoint")
def test_every_choice_is_built(own_project: None, group: str, name: str) -> None:
    built = instantiate(composed(group, name))
    if group == "model":
        assert isinstance(built, LightningModule)
        return
    kind = {"callbacks": Callback, "policy": Policy}[group]
    assert all(isinstance(each, kind) for each in built.values())
    assert built or name == "none"
    if group == "policy":
        GradientPolicies(built)


def test_the_policies_of_the_defaults_list_act(own_project: None) -> None:
    policies = instantiate(compose("config").policy)
    guided, freeze = policies["guided"], policies["random_freeze"]
    assert isinstance(guided, Guided)
    assert isinstance(freeze, Freeze)
    assert guided.when == When(phases=("test",))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with install(model, {"guided": guided}) as installed:
        assert "relu" in str(installed.report())
