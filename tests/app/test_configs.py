"""The whole job for two steps under every config in `conf/`: a new file is tested by being there."""

import pytest
import torch

from .conftest import CONF, QUICK, Ended

# What a config needs beside itself stands in one of its lines.
NEEDS = "# Goes with:"
TESTED_ELSEWHERE = {"trainer=ddp_sim"}
# What the quick tests use of several groups at once.
TOGETHER = (
    "callbacks=record data=digits logger=many optimizer=adam paths=default trainer=fsdp2",
    "callbacks=early_stopping logger=wandb sweep=learning_rate",
)
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


ignored = pytest.mark.filterwarnings(
    "ignore:optimized_metric.* was not logged",
    "ignore:callbacks.initial_weights.path names no checkpoint",
    "ignore:You requested to overfit",
    "ignore:The ``noload`` loader strategy",
)


def run_under(train, choices: list[str], *settings: str) -> Ended:
    groups = [choice.partition("=")[0] for choice in choices]
    quick = [line for line in QUICK if line.partition("=")[0] not in groups]
    needs = [need for choice in choices for need in needs_of(choice)]
    return train(*quick, *needs, f"paths.data_dir={DATA}", *choices, *settings, quick=False)


def assert_trained(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    runs = [*ended.folder.glob("*/runs/*"), *ended.folder.glob("*/sweeps/*/*/config.yaml")]
    assert len(runs) >= 1


@ignored
@pytest.mark.parametrize("choices", TOGETHER)
def test_two_steps_under_configs_of_several_groups(train, choices: str) -> None:
    assert_trained(run_under(train, choices.split()))


@ignored
@pytest.mark.slow
@pytest.mark.parametrize("choice", choices())
def test_two_steps_under(train, choice: str) -> None:
    if needs_gpu(choice) and not torch.cuda.is_available():
        ended = train(choice, "trainer.accelerator=gpu")
        assert (ended.code, ended.left_nothing) == (2, True)
        assert "gpu" in ended.message
        return
    ended = run_under(train, [choice])
    if ended.code and "data_dir" in ended.message and not DATA.is_dir():
        assert (ended.code, ended.left_nothing) == (2, True)
        return
    assert_trained(ended)


def test_every_config_says_at_its_beginning_what_it_is_or_is_one_class() -> None:
    bare = [
        path
        for path in sorted(CONF.glob("**/*.yaml"))
        if "#" not in path.read_text() and path.read_text().count("_target_") != 1
    ]
    assert bare == [CONF / "callbacks/default.yaml", CONF / "trainer/cpu.yaml", CONF / "trainer/gpu.yaml"]
