"""A few processes joined by one process group that run functions and send back what these return."""

import functools
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


class ProcessPool:
    """Runs a function on every rank at once.

    Args:
        size: Number of processes.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    def __init__(self, size: int, backend: str) -> None:
        self.size, self.backend = size, backend

    def __enter__(self) -> "ProcessPool":
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.backend, store, there), daemon=True
            )
            process.start()
            self.connections.append(here)
            self.processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()
        self.folder.cleanup()

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank.

        Args:
            function: A function of a module's top level; it finds its rank with ``torch.distributed``.
            *arguments: Its arguments, the same on every rank.
            timeout: Seconds to wait for all ranks.

        Returns:
            What it returned, by rank.

        Raises:
            RemoteError: If it failed on any rank; says what each rank raised.
        """
        for connection in self.connections:
            connection.send((function.__code__.co_filename, function.__name__, arguments))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(timeout):
                raise TimeoutError(f"rank {rank} gave no answer within {timeout} s")
            answers.append(connection.recv())
        failures = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if failures:
            raise RemoteError(failures)
        return [value for value, _ in answers]


class RemoteError(Exception):
    """What ranks raised: their tracebacks by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, trace in failures.items()))
        self.failures = failures


def _serve(rank: int, size: int, backend: str, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            path, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(_module(path), name)(*arguments), None))
        except Exception:
            connection.send((None, traceback.format_exc()))


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
