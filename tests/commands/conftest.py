"""The tests of commands run the program as those of `launch` do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gradpolicy.commands import cli
from tests.launch.conftest import CONF, train, train_process

__all__ = ["train", "train_process"]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command with wrong input, and gives the one line that it says."""

    def run(*words: str, config_dir: Path = CONF) -> str:
        capsys.readouterr()
        assert cli.main(list(words), config_dir) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said.removeprefix("error: ").strip()

    return run
