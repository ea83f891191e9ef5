"""The tests of commands run the program as those of `launch` do."""

from tests.launch.conftest import train, train_process

__all__ = ["train", "train_process"]
