"""The whole job for two steps under every config in `conf/`: a new file is tested by being there."""

import pytest
import torch

from .conftest import CONF, QUICK

# What a config needs beside itself stands in one of its lines.
NEEDS = "# Goes with:"
TESTED_ELSEWHERE = {"trainer=ddp_sim"}
# Groups of many files, of which the quick tests use several elsewhere.
SLOW = ("debug", "experiment", "model", "policy")
DATA = CONF.parents[1] / "shared/data"


def choices() -> list[str]:
    """Every config of every group, as it is chosen on the command line."""
    found = [
        f"{path.relative_to(CONF).parent.as_posix()}={path.stem}"
        for path in sorted(CONF.glob("*/**/*.yaml"))
        if not path.is_relative_to(CONF / "hydra")
    ]
    return sorted(set(found) - TESTED_ELSEWHERE)


def needs_of(choice: str) -> list[str]:
    group, _, name = choice.partition("=")
    for line in (CONF / group / f"{name}.yaml").read_text().splitlines():
        if line.startswith(NEEDS):
            return line.removeprefix(NEEDS).split()
    return []


def needs_gpu(choice: str) -> bool:
    group, _, name = choice.partition("=")
    return "accelerator: gpu" in (CONF / group / f"{name}.yaml").read_text()


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings(
    "ignore:optimized_metric.* was not logged",
    "ignore:callbacks.initial_weights.path names no checkpoint",
    "ignore:You requested to overfit",
    "ignore:The ``noload`` loader strategy",
)
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(choice, marks=[pytest.mark.slow] if choice.startswith(SLOW) else [])
        for choice in choices()
    ],
)
def test_two_steps_under(train, choice: str) -> None:
    if needs_gpu(choice) and not torch.cuda.is_available():
        ended = train(choice, "trainer.accelerator=gpu")
        assert (ended.code, ended.left_nothing) == (2, True)
        assert ended.message.startswith("trainer.accelerator: ")
        return
    own_group = choice.partition("=")[0]
    quick = [line for line in QUICK if line.partition("=")[0] != own_group]
    ended = train(*quick, *needs_of(choice), f"paths.data_dir={DATA}", choice, quick=False)
    if ended.code and "data_dir" in ended.message and not DATA.is_dir():
        assert (ended.code, ended.left_nothing) == (2, True)
        return
    assert ended.code == 0, ended.err
    runs = [*ended.folder.glob("*/runs/*"), *ended.folder.glob("*/sweeps/*/*/config.yaml")]
    assert len(runs) >= 1


def test_every_config_says_at_its_beginning_what_it_is_or_is_one_class() -> None:
    bare = [
        path
        for path in sorted(CONF.glob("**/*.yaml"))
        # Behind the line that names its schema.
        if "#" not in path.read_text().replace("# yaml-language-server:", "")
        and path.read_text().count("_target_") != 1
    ]
    assert bare == [CONF / "callbacks/default.yaml", CONF / "trainer/cpu.yaml", CONF / "trainer/gpu.yaml"]
