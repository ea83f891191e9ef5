"""Trains a model under gradient policies: ``python train.py --help`` says what can be chosen."""

import sys
from pathlib import Path

from gradpolicy.app.cli import main


def start() -> int:
    """Run the program with the configs beside this file."""
    return main(config_dir=Path(__file__).parent / "conf")


if __name__ == "__main__":
    sys.exit(start())
