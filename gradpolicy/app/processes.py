"""The processes of a run: their command lines, and values that all of them share."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf, open_dict, read_write

from gradpolicy.app import CONFIGS, Exit

# Arguments of a sweep that its jobs must not get, since a job runs alone in the directory of its first rank.
SWEEP_ONLY = re.compile(r"[+~]*hydra(/launcher|/sweeper|\.launcher|\.sweeper|\.sweep|\.mode|\.run)\b")
# Where launchers write the rank of a process, in the order in which Lightning reads them.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
COMMAND = "gradpolicy"


def is_first_rank() -> bool:
    """Return True if this process is the one that prints, plans and writes."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:
        return bool(lightning.rank_zero_only.rank == 0)
    # Importing Lightning takes seconds, and `--help` does not need it.
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


def under_srun() -> bool:
    """Return True if Slurm's ``srun`` started this process beside others."""
    return int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_ID" in os.environ


def in_sweep() -> bool:
    """Return True if this process runs a job of a sweep."""
    # Hydra numbers the jobs of a sweep. Their mode is that of a single run, unless a config sets it.
    return HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().job, "num")


def started() -> str:
    """Return the start time of this run, the same on all its processes, for the name of its directory.

    Under torchrun it is in the store of its agent, also after a restart. Under Slurm's `srun` it is the job
    and step number, so that a requeued job finds its directory.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        import torch.distributed as dist

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
        return str(store.compare_set("gradpolicy/started", "", now).decode())
    if under_srun():
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    return now


def program_name() -> str:
    """Return the command that runs this job again, without its arguments."""
    return "python train.py" if Path(sys.argv[0]).name == "train.py" else COMMAND


OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)
OmegaConf.register_new_resolver("program", program_name, replace=True)


@contextmanager
def termination_exits() -> Iterator[None]:
    """Exit with code 143 on SIGTERM, running all cleanup code."""
    former = exit_with_ranks(None)
    try:
        yield
    finally:
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def exit_with_ranks(launcher: Any) -> Any:
    """Exit with code 143 on SIGTERM from now on, and pass it to the ranks that a launcher has started.

    Returns:
        The former handler; None in a thread, which cannot handle signals.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if launcher is not None:
            launcher.kill(number)
        raise SystemExit(int(Exit.TERMINATED))

    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, end)
    return None


# ---- the other processes that Lightning starts


def quoted(value: str) -> str:
    """Return a value quoted for Hydra.

    Example:
        >>> quoted("a=b, c")
        "'a=b, c'"
    """
    return QuotedString(value, Quote.single).with_quotes()


@contextmanager
def own_command_line(checkpoint: Path | None = None) -> Iterator[None]:
    """Set the command line to that of this job while it runs, and end the process group afterwards.

    Lightning starts other ranks with the command line of this process. In a sweep that is the command line of
    the sweep: each other rank would run all jobs again, and train with other values than the first.

    Args:
        checkpoint: The checkpoint to resume from. The other ranks must not search for the newest one
            themselves.
    """
    import torch.distributed as dist

    main: Any = sys.modules["__main__"]
    argv, spec, environment = sys.argv, getattr(main, "__spec__", None), dict(os.environ)
    hydra: Any = HydraConfig.get()
    sys.argv = [argv[0], *job_arguments(hydra)]
    if checkpoint is not None:
        sys.argv.append(f"ckpt_path={quoted(str(checkpoint.absolute()))}")
    # Lightning starts the script again if it has no spec. In a launcher's worker it is the launcher's.
    is_own = Path(argv[0]).name in (f"{hydra.job.name}.py", COMMAND)
    main.__spec__ = None if is_own else find_spec(f"{COMMAND}.__main__")
    with read_write(hydra), open_dict(hydra):
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield
    finally:
        sys.argv, main.__spec__ = argv, spec
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        # Lightning writes ranks and addresses there, which the next job of a sweep must not inherit.
        os.environ.clear()
        os.environ.update(environment)


def job_arguments(hydra: Any) -> list[str]:
    """Return the command line of this job alone."""
    configs = next(source.path for source in hydra.runtime.config_sources if source.provider == "main")
    place = [] if Path(configs) == CONFIGS.resolve() else ["--config-path", configs]
    kept = [line for line in hydra.overrides.hydra if not SWEEP_ONLY.match(line)]
    return [*place, "--config-name", hydra.job.config_name, *hydra.overrides.task, *kept]
