"""Ends the whole job when a rank dies, and says which rank and why."""

import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from gradpolicy.errors import PolicyError, shown

_KEY = "gradpolicy/died/{rank}"
# Seconds from the error of a rank until the others end the job.
_GRACE = 5.0


class RankWatch(Callback):
    """Watches the other ranks in a thread.

    A rank that raises writes the cause into the process group's store. If a rank that Lightning launched ends
    with an error, or loses its parent, the others notice within a second, print a message to stderr, and end
    the job with code 1. Under torchrun and Slurm the launcher ends the other ranks; the message is the same.

    Args:
        every: Seconds between two checks.
    """

    def __init__(self, every: float = 0.5) -> None:
        if not 0 < every < float("inf"):
            raise PolicyError(f"RankWatch.every: must be a number of seconds above 0, got {shown(every)}")
        self.every = every
        self._over = threading.Event()
        self._store: Any = None
        self._rank, self._ranks, self._parent = 0, 1, 0
        self._children: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the watch: the process group exists now."""
        if trainer.world_size == 1 or not dist.is_initialized() or self._store is not None:
            return
        self._store = dist.distributed_c10d._get_default_store()
        self._rank, self._ranks, self._parent = trainer.global_rank, trainer.world_size, os.getppid()
        self._children = list(getattr(trainer.strategy.launcher, "procs", []))
        self._over.clear()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stores the cause for the other ranks, or names the rank whose death was the cause."""
        if self._store is None or isinstance(exception, SystemExit | KeyboardInterrupt):
            self._over.set()
            return
        if _is_of_connection(exception):
            # Another rank died and so broke a collective here. Its cause may arrive a little later.
            deadline = time.monotonic() + _GRACE
            while time.monotonic() < deadline:
                death = self._death()
                if death:
                    traceback.print_exception(exception)
                    self._end(death)
                time.sleep(self.every / 5)
        self._store.set(_KEY.format(rank=self._rank), f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the watch."""
        self._over.set()
        self._store = None

    def _watch(self) -> None:
        while not self._over.wait(self.every):
            death = self._death()
            if death and self._children:
                self._end(death)
            if death:
                self._over.wait(_GRACE)
                if not self._over.is_set():
                    self._end(death)

    def _death(self) -> str:
        """Says which other rank died and why; empty if all live."""
        for number, child in enumerate(self._children, start=1):
            if child.poll():
                cause = self._cause(number) or describe_exit(child.returncode)
                return f"rank {number} (process {child.pid}) died: {cause}"
        for other in range(self._ranks):
            cause = "" if other == self._rank else self._cause(other)
            if cause:
                return f"rank {other} died: {cause}"
        if os.getppid() != self._parent:
            return "the process that launched this rank died: rank 0, or torchrun"
        return ""

    def _cause(self, rank: int) -> str:
        """The error that a rank stored before it died; empty if there is none or the store is gone."""
        key, store = _KEY.format(rank=rank), self._store
        try:
            return store.get(key).decode() if store is not None and store.check([key]) else ""
        except RuntimeError:
            return ""

    def _end(self, death: str) -> None:
        print(f"[rank {self._rank}] {death}; ending the job", file=sys.stderr, flush=True)
        for child in self._children:
            child.kill()
        os._exit(1)


def describe_exit(code: int) -> str:
    """Says in words how a process ended.

    Example:
        >>> describe_exit(-9)
        'killed by SIGKILL (out of memory?)'
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _is_of_connection(exception: BaseException) -> bool:
    """Whether the cause is a broken connection to another process."""
    return isinstance(exception, dist.DistError) or any(
        word in str(exception) for word in ("Connection", "connection", "NCCL", "gloo")
    )
