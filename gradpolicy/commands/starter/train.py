"""Trains the model under the policies of conf/: ``python train.py --help`` says what can be chosen."""

import sys
from pathlib import Path

from gradpolicy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(config_dir=Path(__file__).parent / "conf"))
