"""Trains a model under gradient policies: ``python train.py --help`` says what can be chosen."""

import os
import signal
import sys
from pathlib import Path


def start() -> int:
    """Runs the program."""
    # Threads that spin while they wait took four times the time on a busy machine. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ctrl-C while the program is imported: nothing has begun, so there is nothing to say.
    former = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from gradpolicy.launch.app import main

    signal.signal(signal.SIGINT, former)
    return main(Path(__file__).parent / "conf")


if __name__ == "__main__":
    sys.exit(start())
