"""What every run has, whatever its config says."""

import warnings

from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment

from gradpolicy.launch.build import build_plugins
from gradpolicy.launch.run import quieter
from gradpolicy.lightning.checkpoint_io import WholeCheckpointIO

from .conftest import SHORT

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


def test_a_profilers_report_is_said(train, caplog) -> None:
    ended = train(*SHORT, "debug=profiler", quick=False)
    assert ended.code == 0
    assert "Profiler Report" in caplog.text


def test_a_warning_is_one_line_without_its_place_in_the_code() -> None:
    before = warnings.formatwarning
    with quieter():
        line = warnings.formatwarning("no\n  value", UserWarning, "run.py", 1)
    assert line == "warning: no value\n"
    assert warnings.formatwarning is before
