"""The plugins of every trainer, whatever its config says; the callback of a sweep's job."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment

from gradpolicy.errors import PolicyError
from gradpolicy.launch.trainer import RequiredMetric, build_plugins
from gradpolicy.lightning.checkpoints import WholeCheckpointIO

PLUGINS = "lightning.pytorch.plugins"


def test_whole_checkpoints_come_beside_the_plugins_of_the_config() -> None:
    assert [type(plugin) for plugin in build_plugins(None)] == [WholeCheckpointIO]
    beside = build_plugins([{"_target_": f"{PLUGINS}.environments.LightningEnvironment"}])
    assert [type(plugin) for plugin in beside] == [LightningEnvironment, WholeCheckpointIO]


def test_a_config_may_have_its_own_way_to_write_them() -> None:
    (own,) = build_plugins({"_target_": f"{PLUGINS}.TorchCheckpointIO"})
    assert type(own) is TorchCheckpointIO


def test_what_only_wraps_the_writing_wraps_whole_checkpoints() -> None:
    (wrapping,) = build_plugins([{"_target_": f"{PLUGINS}.AsyncCheckpointIO"}])
    assert isinstance(wrapping, AsyncCheckpointIO)
    assert isinstance(wrapping.checkpoint_io, WholeCheckpointIO)


def refusal(name: str) -> str:
    """The message of the error after an epoch whose metric `name` is to be optimized; empty without one."""
    trainer: Any = SimpleNamespace(
        callback_metrics={"val/loss": 1.0, "val/accuracy": 0.5},
        callbacks=[ModelCheckpoint(monitor="val/accuracy"), ModelCheckpoint()],
    )
    model: Any = None
    try:
        RequiredMetric(name).on_train_epoch_end(trainer, model)
    except PolicyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["val/loss", "val/accuracy_best", "test/loss", "policy/a/active_share"])
def test_what_is_logged_or_may_be_later_is_no_error(name: str) -> None:
    assert refusal(name) == ""


@pytest.mark.parametrize("name", ["val/acuracy_best", "val/loss_best"])
def test_what_is_not_logged_is_an_error_with_the_nearest_names(name: str) -> None:
    assert refusal(name).startswith(f"optimized_metric: '{name}' is not logged; did you mean")
