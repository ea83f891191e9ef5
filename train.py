"""Trains a model under gradient policies: ``python train.py --help`` says what can be chosen."""

import sys
from pathlib import Path

from gradpolicy.launch.app import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent / "conf"))
