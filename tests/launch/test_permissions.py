"""What only the person who runs the program may set: packages, and what a config may not tell Hydra."""

import os
import stat
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from gradpolicy.errors import PolicyError
from gradpolicy.imports import limited_to
from gradpolicy.launch.config import Source, check_job, compose_job, hydra_at
from gradpolicy.launch.permissions import (
    VARIABLE,
    check_hydra,
    check_launcher,
    check_search_path,
    trusted_packages,
)
from tests.launch.conftest import CONF


def check(*overrides: str) -> None:
    """Checks a command line as the program does before it makes anything."""
    source = Source(CONF)
    with limited_to(trusted_packages(overrides, CONF.parent)), hydra_at(source):
        check_job(compose_job(source, list(overrides)), overrides)


MINE = "+user.mine={_target_: fractions.Fraction}"


def test_packages_are_allowed_on_the_command_line_in_a_file_and_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "allowed_targets.txt").write_text("in_file  # why\n\n# nothing here\nalso.in_file\n")
    monkeypatch.setenv(VARIABLE, "by_variable, another")
    found = trusted_packages(["seed=1", "allowed_targets=[on_line,more]"], tmp_path)
    assert found == ("on_line", "more", "in_file", "also.in_file", "by_variable", "another")


@pytest.mark.parametrize("value", ["3", "[a b]", "'${user.x}'", "a,b"])
def test_what_is_no_package_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"^allowed_targets: must be names of packages"):
        trusted_packages([f"allowed_targets={value}"], tmp_path)


def test_a_package_that_the_person_allows_may_be_named(monkeypatch) -> None:
    check(MINE, "allowed_targets=[fractions]")
    monkeypatch.setenv(VARIABLE, "fractions")
    check(MINE)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(PolicyError, match=r"allowed_targets=\[fractions\]"):
        check(MINE)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "written",
    [
        "# @package _global_\nallowed_targets: [fractions]\n",
        "# @package _global_\nallowed_targets: ${user.list}\nuser: {list: [fractions]}\n",
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {allowed_targets: '[fractions]'}}}\n",
        "# @package _global_\nhydra: {job: {env_set: {GRADPOLICY_ALLOWED_TARGETS: fractions}}}\n",
    ],
)
def test_no_config_allows_anything(train, tmp_path: Path, written: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(written)
    message = train("experiment=theirs", f"--config-dir={tmp_path}", "plan_only=true").refusal
    assert "allowed_targets" in message.lower()


# ---- what a config may tell Hydra


def check_what_is_told_hydra(*overrides: str, more: Path | None = None) -> None:
    source = Source(CONF, more=more)
    with hydra_at(source):
        check_hydra(compose_job(source, list(overrides)), list(overrides))


LOG_RESULT = "hydra.experimental.callbacks.LogJobReturnCallback"
CALLBACK = "hydra.callbacks.mine"
REFUSED = {
    f"+{CALLBACK}._target_=os.getcwd": f"{CALLBACK}._target_",
    f"+{CALLBACK}._target_={LOG_RESULT}": f"{CALLBACK}._target_",
    "hydra.job.name=../x": "hydra.job.name",
    f"+{CALLBACK}._target_=hydra.experimental.callbacks.pickle.loads": f"{CALLBACK}._target_",
    "+hydra.callbacks.mine='${user.theirs}'": "hydra.callbacks.mine",
    "hydra.callbacks='${user.all}'": "hydra.callbacks",
    "hydra.job_logging.handlers.file.class=os.system": "hydra.job_logging.handlers.file.class",
    "hydra.job_logging.handlers.file.class='${user.word}'": "hydra.job_logging.handlers.file.class",
    "hydra.job_logging.handlers.file.filename=/etc/passwd": "hydra.job_logging.handlers.file.filename",
    "hydra.job_logging.handlers.file.filename='${hydra.runtime.output_dir}/../x.log'": "filename",
    "+hydra.job_logging.handlers.file.mode=w": "hydra.job_logging.handlers.file.mode",
    "hydra.job_logging.handlers.console.stream=ext://os.environ": "hydra.job_logging.handlers.console.stream",
    "+hydra.job_logging.handlers.console.level=ext://antigravity.x": "handlers.console.level",
    "+hydra.job_logging.handlers.mine={\\(\\):os.system}": "hydra.job_logging.handlers.mine.()",
    "+hydra.job_logging.formatters.mine.class=logging.FileHandler": "hydra.job_logging.formatters.mine.class",
    "hydra.hydra_logging='${user.all}'": "hydra.hydra_logging",
    "+hydra.job.env_set.LD_PRELOAD=x.so": "hydra.job.env_set",
    "hydra.output_subdir=../over": "hydra.output_subdir",
    "hydra.launcher._target_=hydra_plugins.os.system": "hydra.launcher._target_",
    "hydra.sweeper._target_=hydra_plugins.os.system": "hydra.sweeper._target_",
    "+hydra.sweeper.params={'hydra.job.name':x}": "hydra.sweeper.params",
}
TAKEN = (
    "hydra.job_logging.root.level=DEBUG",
    "hydra/job_logging=disabled",
    "hydra/job_logging=stdout",
    "+hydra.job.env_set.OMP_NUM_THREADS=1",
    "hydra.output_subdir=null",
)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("override", REFUSED)
def test_what_would_run_import_or_overwrite_is_refused_by_its_key(train, override: str) -> None:
    more = ("+user.theirs={_target_:os.getcwd}", "+user.all={a:{_target_:os.getcwd}}", "+user.word=x")
    assert REFUSED[override] in train(override, *more, "plan_only=true").refusal


@pytest.mark.parametrize("override", TAKEN)
def test_what_people_set_is_taken(override: str) -> None:
    check_what_is_told_hydra(override)


def test_callbacks_of_hydra_are_built_from_allowed_packages() -> None:
    override = f"+{CALLBACK}._target_={LOG_RESULT}"
    with limited_to(["hydra.experimental.callbacks"]):
        check_what_is_told_hydra(override)
        for more in (f"+{CALLBACK}.x={{_target_: os.getcwd}}", f"+{CALLBACK}.x='${{user.a}}'"):
            with pytest.raises(PolicyError, match=rf"^{CALLBACK}\.x"):
                check_what_is_told_hydra(override, "+user.a=1", more)


@pytest.mark.parametrize(
    ("name", "line"), [("setup", "[touch /tmp/x]"), ("name", '"a\\nb"'), ("partition", '"a\\nb"')]
)
def test_shell_lines_come_from_the_command_line_alone(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_slurm\n"
        f"hydra:\n  launcher:\n    {name}: {line}\n"
    )
    with pytest.raises(PolicyError, match=rf"^hydra\.launcher\.{name}"):
        check_what_is_told_hydra("experiment=theirs", more=tmp_path)


@pytest.mark.parametrize("path", ["pkg://antigravity", "file:///tmp", "${oc.env:HOME}"])
def test_a_config_does_not_send_hydra_elsewhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "train.yaml").write_text(f"hydra:\n  searchpath: ['{path}']\n")
    with pytest.raises(PolicyError, match=r"^hydra\.searchpath: "):
        check_search_path([tmp_path], "train")


@pytest.mark.parametrize("name", ["theirs", "theirs.v2", "theirs.yaml"])
def test_a_package_of_a_search_path_is_not_imported(train, tmp_path: Path, monkeypatch, name: str) -> None:
    (tmp_path / "their_package.py").write_text("raise SystemExit('this must not run')\n")
    file = tmp_path / (name if name.endswith(".yaml") else f"{name}.yaml")
    content = "hydra: {searchpath: ['pkg://their_package']}\ndefaults: [train]\n"
    # Hydra reads this tag, which PyYAML's own loader refuses.
    file.write_text(content + "user: {path: !!python/object/apply:pathlib.Path [a]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended = train(f"--config-name={name}", f"--config-dir={tmp_path}", "plan_only=true")
    assert ended.code == 2
    assert "hydra.searchpath" in ended.message
    assert "their_package" not in sys.modules


def test_a_text_that_looks_like_a_date_is_text(train, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text("# @package _global_\nuser: {day: 2024-13-45}\n")
    (tmp_path / "theirs.yaml").write_text("defaults: [train]\nuser: {day: 2024-13-45}\n")
    for chosen in ("experiment=theirs", "--config-name=theirs"):
        assert train(chosen, f"--config-dir={tmp_path}", "plan_only=true").code == 0


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "flags", [["plan_only=true"], ["--cfg", "job"], ["--info", "searchpath"], ["--help"]]
)
def test_a_package_of_the_command_line_must_be_allowed(train, tmp_path: Path, monkeypatch, flags) -> None:
    (tmp_path / "found_package.py").write_text("raise SystemExit('this must not run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended = train("hydra.searchpath=[pkg://found_package]", *flags)
    assert (ended.code, ended.left_nothing) == (2, True)
    assert ended.message.startswith("hydra.searchpath: 'pkg://found_package'")
    assert "found_package" not in sys.modules


def test_a_pickled_job_is_not_run_again(train, tmp_path: Path) -> None:
    ended = train(f"--experimental-rerun={tmp_path}/config.pickle")
    assert ended.code == 2
    assert "pickle" in ended.message


# ---- launchers

SLURM = ("hydra/launcher=submitit_slurm", "trainer=slurm", "hydra.launcher.partition=gpu")


@pytest.fixture
def composed():
    with hydra_at(Source(CONF)):
        yield compose_job(Source(CONF), list(SLURM))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has srun."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def test_the_config_makes_the_launcher_of_submitit(composed, cluster: Path) -> None:
    assert check_launcher(composed) is None
    launcher = instantiate(composed.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    assert launcher.params["partition"] == "gpu"
    assert launcher.params["signal_delay_s"] == 120


def test_without_slurm_the_message_says_what_to_do(train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    ended = train("-m", "seed=1,2", "hydra/launcher=submitit_slurm")
    assert (ended.code, ended.left_nothing) == (2, True)
    assert ended.message.startswith("hydra/launcher=submitit_slurm: there is no srun here; ")
    assert "hydra/launcher=submitit_local" in ended.message


def test_without_the_plugin_the_message_names_the_extra(
    train, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher.submitit_launcher", None)
    refusal = train("-m", "seed=1,2", "hydra/launcher=submitit_slurm").refusal
    assert refusal.startswith("needs hydra_plugins, which is not installed: pip install 'gradpolicy[sweeps]'")


def test_the_slurm_trainer_takes_ranks_and_nodes_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "6",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NNODES": "3",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_NODELIST": "n1",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    # A trainer sets it to its own rank, for the whole process.
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with hydra_at(Source(CONF)):
        settings = ["trainer=slurm", "trainer.accelerator=cpu", "trainer.devices=2"]
        trainer = instantiate(compose_job(Source(CONF), settings).trainer)
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.auto_requeue is False
    assert (trainer.num_nodes, trainer.world_size) == (3, 6)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (5, 1, 2)
    assert environment.creates_processes_externally, "srun has started them: none is launched"
