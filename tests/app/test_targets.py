"""What a config names: it is found, its arguments are checked by its signature, and it is built."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from torch import Tensor

import gradpolicy as gp
from gradpolicy.app.targets import build, check_arguments, check_value

from .conftest import CONF, ROOT, SHORT

LINEAR = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim.AdmW", "did you mean 'Adam"),
        ("torch.optim.adamw.AdamX", "AdamW"),
        ("torch.nn.nosuch.Thing", "has no 'nosuch'"),
        ("nosuch.Thing", "needs nosuch, which is not installed"),
        ("not a path", "dotted path"),
        ("a" * 5000, "cannot be imported"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(path: str, words: str) -> None:
    with pytest.raises(gp.PolicyError, match=f"^user.part._target_: .*{words}") as refused:
        check_arguments({"_target_": path}, "user.part")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.optim.AdamW", "lrr": 0.1}, r"^top\.lrr: .*did you mean 'lr'"),
        ({"_target_": "torch.optim.AdamW", "lr": "abc"}, r"^top\.lr: must be a valid number.*got 'abc'"),
        ({"_target_": "gradpolicy.Stop", "modles": "x"}, r"^top\.modles: .*modules"),
        (
            {"below": [{"_target_": "gradpolicy.When", "stride": "x"}]},
            r"^top\.below\[0\]\.stride: must be a valid integer",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_key(node: dict, message: str) -> None:
    with pytest.raises(gp.PolicyError, match=message):
        check_arguments(node, key="top")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1, "betas": [0.9, 0.99]},
        {**LINEAR, "bias": False},
        {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": ".", "anything": 1},
        {
            "_target_": "torchmetrics.MetricCollection",
            "_recursive_": False,
            "metrics": {"_target_": "torch.nn.Linear"},
        },
        {"_target_": "gradpolicy.Freeze", "mask": {"_target_": "gradpolicy.masks.Random", "density": 1}},
        {"_target_": "gradpolicy.Scale", "_args_": [0.1], "modules": "x"},
    ],
)
def test_what_a_target_takes_passes(node: dict) -> None:
    assert check_arguments(node, key="top") is None


# As older code writes it.
Either = Optional[Union[Literal["a", "b"], bool]]  # noqa: UP007, UP045
NUMBER = "key: must be a valid number"


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (3, float, None),
        (True, int, "key: must be a valid integer, got True"),
        ("abc", float, f"{NUMBER}, got 'abc'"),
        ("0.1", float, f"{NUMBER}, got '0.1'"),
        ("abc", float | Tensor, f"{NUMBER} or an instance of Tensor, got 'abc'"),
        ([0.9, 0.99], tuple[float, float], None),
        ([0.9, "x"], tuple[float, float], "key[1]: must be a valid number, unable to parse string"),
        ([0.9], tuple[float, float], "key[1]: Field required, got [0.9]"),
        (["a", "b"], str | Iterable[str], None),
        ("x", int | None, "key: must be a valid integer, got 'x'"),
        ("x", float | Callable[[int], float], f"{NUMBER} or callable, got 'x'"),
        (3, Either, "key: must be 'a' or 'b' or a valid boolean, got 3"),
        ({"a": 1}, dict[str, int], None),
        (object(), Any, None),
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
    inner = {**LINEAR, "out_features": "x"}
    with pytest.raises(gp.PolicyError, match=r"^model\.model\.module: TypeError: "):
        build({"_target_": "torch.nn.ModuleDict", "module": inner}, "model.model")
    with pytest.raises(gp.PolicyError, match=r"^model\.model: must be a Module, got Stop"):
        build({"_target_": "gradpolicy.Stop", "modules": "x"}, "model.model", torch.nn.Module)


def test_nodes_below_are_built_first() -> None:
    node = {"_target_": "torch.nn.ModuleDict", "modules": {"first": LINEAR}}
    assert build(node, "model.model")["first"].out_features == 3


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


@pytest.mark.parametrize(
    "way", [pytest.param("train.py", marks=pytest.mark.slow), "gradpolicy", "gradpolicy --config-path"]
)
def test_a_module_of_ones_own_is_named_without_permission(tmp_path: Path, way: str) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    project.mkdir()
    (project / "own_module.py").write_text(OWN)
    (project / "train.py").write_text((ROOT / "train.py").read_text())
    (project / "conf").symlink_to(CONF)
    script = tmp_path / "bin/gradpolicy"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    command, folder = {
        "train.py": ([project / "train.py"], elsewhere),
        "gradpolicy": ([script], project),
        "gradpolicy --config-path": ([script, "--config-path", project / "conf"], elsewhere),
    }[way]
    words = [*SHORT, "+callbacks.own._target_=own_module.Says", "logger=none", "callbacks=none", "test=false"]
    done = subprocess.run(
        [sys.executable, *map(str, command), *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "own module, heard" in done.stdout
