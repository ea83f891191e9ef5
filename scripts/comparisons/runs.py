"""Runs what is not done yet, each in a directory of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from comparisons.families import BASE, Family, Variant
from gradpolicy.errors import PolicyError
from gradpolicy.insight.results import RESULT, Result
from gradpolicy.launch.app import main
from gradpolicy.launch.processes import quoted

# Nothing is printed but the progress of the whole.
QUIET = (
    "extras.plan=false",
    "trainer.enable_progress_bar=false",
    "++callbacks.progress_bar=null",
)
CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Run:
    """A variant with a seed.

    Attributes:
        variant: What it is of.
        seed: Its seed.
        overrides: What it sets in the config.
        directory: Where it is kept.
    """

    variant: str
    seed: int
    overrides: tuple[str, ...]
    directory: Path

    @property
    def result(self) -> Result | None:
        """What came of it; None if it is not finished, or was run with other settings."""
        path = self.directory / RESULT
        if not path.is_file():
            return None
        try:
            result = Result.load(path)
        except PolicyError:  # it was broken off while it was written
            return None
        is_this_one = result.status == "completed" and set(result.overrides) == set(self.overrides)
        return result if is_this_one else None


def runs_of(family: Family, seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()) -> Iterator[Run]:
    """Lists the runs of a family, the base of each seed first.

    Args:
        family: What is compared.
        seeds: A run of each variant with each.
        out: The runs lie below it, as ``VARIANT/seed-SEED``.
        overrides: What all of them set in the config besides.
    """
    for seed in seeds:
        base = (out / family.base.name / f"seed-{seed}").absolute() if family.base else None
        for variant in (*([family.base] if family.base else []), *family.variants):
            directory = (out / variant.name / f"seed-{seed}").absolute()
            lines = [*_filled(variant, base), f"seed={seed}", *QUIET, *overrides]
            yield Run(variant.name, seed, tuple(lines), directory)


def train(run: Run) -> None:
    """Runs it in this process, with what it prints in a file.

    Raises:
        PolicyError: If it fails.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    log = run.directory.with_suffix(".log")
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = main(CONF, [*run.overrides, f"hydra.run.dir={quoted(str(run.directory))}"])
    if code:
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        cause = errors[-1].removeprefix("error: ") if errors else f"ended with code {code}"
        raise PolicyError(f"{run.variant} with seed {run.seed}: {cause} (see {log})")


def finish(runs: Sequence[Run], begin: Callable[[Run], None], train: Callable[[Run], None] = train) -> None:
    """Trains what is not done yet.

    Args:
        runs: In order.
        begin: Is told of each run before it begins or is passed over.
        train: Trains one.
    """
    for run in runs:
        begin(run)
        if run.result is None:
            train(run)


def _filled(variant: Variant, base: Path | None) -> list[str]:
    return [line.replace(BASE, str(base)) for line in variant.overrides]
