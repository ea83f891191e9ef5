"""What a config names: it is found, its arguments are checked by its signature, and it is built."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

import gradpolicy as gp
from gradpolicy.app.build import build, build_plugins, check_arguments, check_value
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO

from .conftest import CONF, ROOT, SHORT


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim.AdmW", "did you mean 'Adam"),
        ("torch.nn.nosuch.Thing", "has no 'nosuch'"),
        ("nosuch.Thing", "needs nosuch, which is not installed"),
        ("not a path", "dotted path"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(path: str, words: str) -> None:
    with pytest.raises(gp.PolicyError, match=f"^user.part._target_: .*{words}"):
        check_arguments({"_target_": path}, "user.part")


def test_what_a_target_takes_passes() -> None:
    unbuilt = {"_recursive_": False, "metrics": {"_target_": "torch.nn.Linear"}}
    for node in (
        {"_target_": "torchmetrics.MetricCollection", **unbuilt},
        {"_target_": "gradpolicy.Scale", "_args_": [0.1], "modules": "x"},
    ):
        assert check_arguments(node, key="top") is None


# As older code writes it.
Either = Optional[Union[Literal["a", "b"], bool]]  # noqa: UP007, UP045
NUMBER = "key: must be a valid number"


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (3, float, None),
        (True, int, "key: must be a valid integer, got True"),
        ("0.1", float, f"{NUMBER}, got '0.1'"),
        ("abc", float | Tensor, f"{NUMBER} or an instance of Tensor, got 'abc'"),
        ([0.9, 0.99], tuple[float, float], None),
        ([0.9, "x"], tuple[float, float], "key[1]: must be a valid number, unable to parse string"),
        ([0.9], tuple[float, float], "key[1]: Field required, got [0.9]"),
        (["a", "b"], str | Iterable[str], None),
        ("x", float | Callable[[int], float], f"{NUMBER} or callable, got 'x'"),
        (3, Either, "key: must be 'a' or 'b' or a valid boolean, got 3"),
    ],
)
def test_text_never_stands_for_a_number_but_a_list_may_for_a_tuple(
    value: object, annotation: Any, words: str | None
) -> None:
    if words is None:
        assert check_value("key", annotation, value) is None
        return
    with pytest.raises(gp.PolicyError) as raised:
        check_value("key", annotation, value)
    assert str(raised.value).startswith(words)


def test_the_innermost_node_that_failed_is_named_with_the_cause() -> None:
    below = {"below": [{"_target_": "gradpolicy.When", "every": "x"}]}
    with pytest.raises(gp.PolicyError, match=r"^top\.below\[0\]\.every: must be a valid integer"):
        check_arguments(below, key="top")
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": "x"}
    with pytest.raises(gp.PolicyError, match=r"^model\.model\.module: TypeError: "):
        build({"_target_": "torch.nn.ModuleDict", "module": inner}, "model.model")
    with pytest.raises(gp.PolicyError, match=r"^model\.model: must be a Module, got Stop"):
        build({"_target_": "gradpolicy.Stop", "modules": "x"}, "model.model", torch.nn.Module)


# ---- plugins of the trainer

PLUGINS = "lightning.pytorch.plugins"


def test_whole_checkpoints_come_beside_the_plugins_of_the_config() -> None:
    assert [type(plugin) for plugin in build_plugins(None)] == [AtomicCheckpointIO]
    beside = build_plugins([{"_target_": f"{PLUGINS}.environments.LightningEnvironment"}])
    assert [type(plugin) for plugin in beside] == [LightningEnvironment, AtomicCheckpointIO]


def test_a_config_may_have_its_own_way_to_write_them() -> None:
    (own,) = build_plugins({"_target_": f"{PLUGINS}.TorchCheckpointIO"})
    assert type(own) is TorchCheckpointIO


# ---- modules of one's own

OWN = """
from lightning.pytorch import Callback

class Says(Callback):
    def on_fit_start(self, *arguments):
        print("own module, heard")
"""
# As the script that pip installs, whose own directory is the first of the path.
SCRIPT = f"""
import sys
sys.path.append({str(ROOT)!r})
from gradpolicy.app.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_module_of_ones_own_is_named_without_permission(tmp_path: Path, elsewhere: bool) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "own_module.py").write_text(OWN)
    (project / "conf").symlink_to(CONF)
    script = tmp_path / "bin/gradpolicy"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    command = [script, "--config-path", project / "conf"] if elsewhere else [script]
    folder = tmp_path if elsewhere else project
    words = [*SHORT, "+callbacks.own._target_=own_module.Says", "logger=none", "callbacks=none", "test=false"]
    done = subprocess.run(
        [sys.executable, *map(str, command), *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "own module, heard" in done.stdout
