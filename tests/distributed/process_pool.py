"""A few processes joined by one process group that run functions and send back what these return."""

import faulthandler
import functools
import importlib.util
import inspect
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.utils._pytree import tree_map_only

from gradpolicy.errors import PolicyError

# Seconds until a call is given up, which may begin with imports on a busy machine; a little earlier each
# process shows where it waits.
_PATIENCE = 300.0
# Seconds that the other ranks have to answer when one has failed.
_PATIENCE_AFTER_FAILURE = 3.0
# Imported once; every process of every pool is a fork of that one.
_IMPORTED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "lightning.pytorch",
    "gradpolicy.train.lightning.callback",
]


def here() -> torch.device:
    """Where this process's tensors belong: its GPU on a rank of an nccl pool, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


class ProcessPool:
    """Runs a function on every rank at once.

    Args:
        size: Number of processes.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    def __init__(self, size: int, backend: str) -> None:
        self.size, self.backend = size, backend

    def __enter__(self) -> "ProcessPool":
        self.processes: list[Any] = []
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.connections: list[Connection] = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.backend, store, there), daemon=True
            )
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def _stop(self) -> None:
        if not self.processes:
            return
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
        self.folder.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank.

        Args:
            function: A function of a module's top level; it finds its rank with ``torch.distributed``.
            *arguments: Its arguments, the same on every rank.

        Returns:
            What it returned, by rank, with all tensors on the CPU.

        Raises:
            RemoteError: If it failed on any rank; says what each rank raised.
        """
        if not self.processes:
            self._start()
        for connection in self.connections:
            file = inspect.unwrap(function).__code__.co_filename
            connection.send((file, function.__name__, arguments))
        answers = self._answers(time.monotonic() + _PATIENCE)
        failures = {rank: error for rank, (_, error) in answers.items() if error is not None}
        if len(answers) < self.size or "the process died" in failures.values():
            # The ranks are no longer at the same point: the next call starts new ones.
            self._stop()
        if failures or len(answers) < self.size:
            raise RemoteError(failures or dict.fromkeys(range(self.size), "no answer"))
        return [answers[rank][0] for rank in range(self.size)]

    def _answers(self, deadline: float) -> dict[int, Any]:
        """What the ranks send back; when one has failed, the others are not waited for long."""
        answers: dict[int, Any] = {}
        while len(answers) < self.size and time.monotonic() < deadline:
            silent = [c for rank, c in enumerate(self.connections) if rank not in answers]
            for connection in wait(silent, timeout=1.0):
                rank = self.connections.index(connection)  # type: ignore
                try:
                    answers[rank] = connection.recv()  # type: ignore
                except (EOFError, ConnectionError):
                    answers[rank] = (None, "the process died")
            if any(error is not None for _, error in answers.values()):
                deadline = min(deadline, time.monotonic() + _PATIENCE_AFTER_FAILURE)
        return answers


def refusal(call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """What a call is refused with: the message of its PolicyError, or nothing."""
    try:
        call(*arguments, **settings)
    except PolicyError as error:
        return str(error)
    return ""


class RemoteError(Exception):
    """What ranks raised: their tracebacks by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, trace in failures.items()))
        self.failures = failures


def _serve(rank: int, size: int, backend: str, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    # Show where the process is if it crashes, not only if it waits.
    faulthandler.enable()
    # What torchrun sets: Lightning then takes these processes for its ranks.
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            path, name, arguments = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(_PATIENCE - 5)
        try:
            answer = getattr(_module(path), name)(*arguments)
            connection.send((tree_map_only(Tensor, Tensor.cpu, answer), None))
        except Exception:
            connection.send((None, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()


@functools.cache
def _module(path: str) -> ModuleType:
    """The module of a file; pytest knows it by a name that another process cannot import."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
