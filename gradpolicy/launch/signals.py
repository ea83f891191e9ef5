"""Ends the program in good order on SIGTERM also while nothing is trained.

While it trains, :class:`gradpolicy.lightning.preemption.SaveOnPreemption` saves a checkpoint first.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gradpolicy.launch.errors import TERMINATED


@contextmanager
def termination_exits() -> Iterator[None]:
    """Lets SIGTERM unwind the program, so that everything is closed, and exit with 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
