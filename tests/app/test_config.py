"""Composition: config directories of the user, and input that is refused before slow packages load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import CONF, ROOT

WRONG_NAMES = (
    "policy=gided",
    "policy=[stop,gided]",
    "optmizer.lr=1",
    "trainer.max_epoch=3",
    "trainer.nosuch=3",
    "+sede=3",
    "~nosuch",
    "debug=wrong",
    "experiment=wrong",
    "policy=null",
    "seed=one",
    "seed=4294967296",
)


@pytest.mark.slow
def test_a_wrong_name_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    program = (
        "import json, pathlib, sys; from gradpolicy.app.launch import main\n"
        f"codes = [main(pathlib.Path({str(CONF)!r}), [line]) for line in {WRONG_NAMES!r}]\n"
        "loaded = [name for name in ('torch', 'lightning', 'numpy') if name in sys.modules]\n"
        "print(json.dumps([codes, loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.count("\n") == len(WRONG_NAMES)
    assert json.loads(done.stdout) == [[2] * len(WRONG_NAMES), []]


def test_a_wrong_argument_of_a_policy_is_refused_before_data_and_models_are_loaded(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from gradpolicy.app.launch import main\n"
        f"code = main(pathlib.Path({str(CONF)!r}), ['policy.random_freeze.mask.density=2'])\n"
        "print(code, [name for name in ('lightning', 'sklearn', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 []\n"
    assert done.stderr.startswith(
        "error: policy.random_freeze.mask.density: expected a number between 0 and 1"
    )


def test_help_and_config_are_told_without_torch() -> None:
    for flags in (["--help"], ["--cfg", "job", "policy=guided"]):
        program = "import sys, train; train.start(); sys.exit(3 if 'torch' in sys.modules else 0)"
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A directory of configs of one's own."""
    (tmp_path / "conf/policy").mkdir(parents=True)
    (tmp_path / "conf/policy/mine.yaml").write_text(
        "cut: {_target_: gradpolicy.Stop, modules: model.probe}\n"
    )
    return tmp_path / "conf"


def test_a_further_config_directory_is_used_and_its_names_are_named(train, mine: Path) -> None:
    ended = train("--config-dir", str(mine), "policy=mine", "plan_only=true").completed
    assert "│ cut" in ended.out
    assert "'mine'" in train("--config-dir", str(mine), "policy=mne").refusal


def test_a_further_directory_that_does_not_exist_is_refused(train, tmp_path: Path) -> None:
    message = train("--config-dir", str(tmp_path / "nowhere"), "policy=none").refusal
    assert f"{tmp_path}/nowhere does not exist" in message
