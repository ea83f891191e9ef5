"""What the processes that Lightning launches beside this one are told to run.

Lightning starts them with this process's command line. In a sweep that is the command line of the whole
sweep: every rank but the first would run all jobs again, and train with other values than the first. So while
a job runs, the command line is the job's own.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

# What a rank must not be told: it runs one job, in the directory of the first rank.
SWEEPS_OWN = re.compile(r"[+~]*hydra(/launcher|/sweeper|\.launcher|\.sweeper|\.sweep|\.mode|\.run)\b")
# Lightning sets these for the processes it launches; a job must not find those of the job before.
LAUNCHED_BY_LIGHTNING = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Where those who start processes write a process's number; Lightning asks in this order.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def is_first_rank() -> bool:
    """Whether this process is the one that prints, plans and writes."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:
        return bool(lightning.rank_zero_only.rank == 0)
    # Lightning takes seconds to load: what needs none of it, such as `--help`, asks as Lightning would.
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


def quoted(value: str) -> str:
    """Writes a value so that Hydra reads it as it is.

    Example:
        >>> quoted("a=b, c")
        "'a=b, c'"
    """
    # A backslash is only special before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


@contextmanager
def own_command_line(checkpoint: Path | None = None) -> Iterator[None]:
    """Makes the command line this job's own while it runs, and cleans up what launching ranks leaves.

    Args:
        checkpoint: What the job resumes from: the other ranks must not look for the newest on their own.
    """
    if not HydraConfig.initialized():
        yield
        return
    import torch.distributed as dist

    main = sys.modules["__main__"]
    argv, spec = sys.argv, getattr(main, "__spec__", None)
    environment = {name: os.environ.get(name) for name in LAUNCHED_BY_LIGHTNING}
    hydra: Any = HydraConfig.get()
    sys.argv = [str(program(hydra)), *job_arguments(hydra)]
    if checkpoint is not None:
        sys.argv.append(f"ckpt_path={quoted(str(checkpoint.absolute()))}")
    main.__spec__ = None
    with read_write(hydra), open_dict(hydra):
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield
    finally:
        sys.argv, main.__spec__ = argv, spec
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def job_arguments(hydra: Any) -> list[str]:
    """The command line that runs this job alone."""
    sources = {source.provider: source.path for source in hydra.runtime.config_sources}
    arguments = ["--config-name", hydra.job.config_name] if hydra.job.config_name else []
    if "command-line" in sources:
        arguments += ["--config-dir", sources["command-line"]]
    kept = [line for line in hydra.overrides.hydra if not SWEEPS_OWN.match(line)]
    return [*arguments, *hydra.overrides.task, *kept]


def program(hydra: Any) -> Path:
    """The program that runs a job; in a worker of a launcher the command line does not say."""
    started = Path(sys.argv[0])
    if started.suffix == ".py" and started.name == f"{hydra.job.name}.py":
        return started.absolute()
    configs = next(Path(source.path) for source in hydra.runtime.config_sources if source.provider == "main")
    return configs.parent / "train.py"
