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
@pytest.mark.parametrize("name", names("policy"))
def test_policies(own_project: None, name: str) -> None:
    policies = instantiate(composed("policy", name))
    assert all(isinstance(policy, Policy) for policy in policies.values())
    assert policies or name == "none"
    GradientPolicies(policies)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", names("model"))
def test_models(own_project: None, name: str) -> None:
    assert isinstance(instantiate(composed("model", name)), LightningModule)


@pytest.mark.parametrize("name", names("callbacks"))
@pytest.mark.filterwarnings("ignore:callbacks.initial_weights.path names no checkpoint")
def test_callbacks(own_project: None, name: str) -> None:
    built = instantiate(composed("callbacks", name))
    assert all(isinstance(callback, Callback) for callback in built.values())
    assert built or name == "none"


def test_the_policies_of_the_defaults_list_act(own_project: None) -> None:
    policies = instantiate(compose("config").policy)
    guided, freeze = policies["guided"], policies["random_freeze"]
    assert isinstance(guided, Guided)
    assert isinstance(freeze, Freeze)
    assert guided.when == When(phases=("test",))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with install(model, {"guided": guided}) as installed:
        assert "relu" in str(installed.report())
