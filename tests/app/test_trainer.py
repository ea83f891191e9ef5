"""The plugins of every trainer, whatever its config says."""

from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment

from gradpolicy.app.trainer import build_plugins
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO

PLUGINS = "lightning.pytorch.plugins"


def test_whole_checkpoints_come_beside_the_plugins_of_the_config() -> None:
    assert [type(plugin) for plugin in build_plugins(None)] == [AtomicCheckpointIO]
    beside = build_plugins([{"_target_": f"{PLUGINS}.environments.LightningEnvironment"}])
    assert [type(plugin) for plugin in beside] == [LightningEnvironment, AtomicCheckpointIO]


def test_a_config_may_have_its_own_way_to_write_them() -> None:
    (own,) = build_plugins({"_target_": f"{PLUGINS}.TorchCheckpointIO"})
    assert type(own) is TorchCheckpointIO
