"""Which packages a person allows, and that no config can."""

from pathlib import Path

import pytest

from gradpolicy.errors import PolicyError
from gradpolicy.imports import limited_to
from gradpolicy.launch.allowed_targets import VARIABLE, trusted_packages
from gradpolicy.launch.compose import Source, check_job, compose_job, hydra_at
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


@pytest.mark.parametrize("override", ["allowed_targets=fractions", "allowed_targets=[fractions]"])
def test_a_package_that_the_command_line_allows_may_be_named(override: str) -> None:
    check(MINE, override)
    with pytest.raises(PolicyError, match=r"allowed_targets=\[fractions\]"):
        check(MINE)


def test_a_variable_allows_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fractions")
    check(MINE)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "written",
    [
        "# @package _global_\nallowed_targets: [fractions]\n",
        "# @package _global_\nallowed_targets: ${user.list}\nuser: {list: [fractions]}\n",
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {allowed_targets: '[fractions]'}}}\n",
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {+allowed_targets: fractions}}}\n",
        "# @package _global_\nhydra: {job: {env_set: {GRADPOLICY_ALLOWED_TARGETS: fractions}}}\n",
    ],
)
def test_no_config_allows_anything(train, tmp_path: Path, written: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(written)
    message = train("experiment=theirs", f"--config-dir={tmp_path}", "plan_only=true").refusal
    assert "allowed_targets" in message.lower()


def test_no_shipped_config_allows_anything() -> None:
    written = "".join(path.read_text() for path in CONF.rglob("*.yaml"))
    assert written.count("allowed_targets:") == written.count("allowed_targets: []") == 1
