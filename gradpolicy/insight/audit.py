"""The proof of what policies promise: frozen entries kept their bits, stopped branches got no gradient."""

import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from pydantic import BaseModel, NonNegativeInt

from gradpolicy.checks import check_choice, check_flag, check_whole
from gradpolicy.errors import PromiseError
from gradpolicy.insight.flow_checks import Checked, FlowDifference, MetOperations, StoppedBranches
from gradpolicy.insight.frozen_intervals import Counts, Difference, FrozenIntervals
from gradpolicy.insight.run_log import say
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.policies import Stop
from gradpolicy.where import named_parameters

FILE = "audit.json"
ON_DIFFERENCE = ("stop", "warn")
# Sums over ranks and over the parts of a resumed run.
SUMMED = (
    "intervals",
    "entries",
    "changed",
    "watched",
    "candidates",
    "stopped_checked",
    "stopped_nonzero",
    "operations_checked",
    "operations_differing",
)


class SavedDifference(BaseModel, extra="forbid", strict=True):
    """A difference in a checkpoint."""

    tensor: str
    what: str
    policy: str
    count: int
    step: int
    rank: int
    indices: list[list[int]]
    message: str


class SavedCounts(BaseModel, extra="forbid", strict=True):
    """What a checkpoint says was counted."""

    intervals: NonNegativeInt
    entries: NonNegativeInt
    changed: NonNegativeInt
    watched: NonNegativeInt
    candidates: NonNegativeInt
    chosen: NonNegativeInt
    stopped_checked: NonNegativeInt
    stopped_nonzero: NonNegativeInt
    operations_checked: NonNegativeInt
    operations_differing: NonNegativeInt
    differences: list[SavedDifference]


class Audit(Callback):
    """Checks in training that the policies of :class:`~gradpolicy.GradientPolicies` do what they promise.

    - Frozen entries keep their bits: weights, and optimizer state under ``frozen_state="keep"``. Fingerprints
      at the begin and the end of intervals between changes of masks tell. Where masks stay, an interval lasts
      from one look to the next. The last looks are at each checkpoint and at the very end, after all other
      callbacks.
    - What :class:`~gradpolicy.Stop` stops receives exactly zero.
    - Each flow policy meets the same operations in every batch that is looked at.

    At the end it prints one line, such as ``frozen entries: 1,284 intervals, 0 changed``, and writes
    ``audit.json``. Each process checks what it holds; rank 0 writes what all of them counted. A resumed run
    adds to what was counted up to its checkpoint. The order among the callbacks does not matter.

    Args:
        directory: Where ``audit.json`` is written; the trainer's own unless given.
        entries: The most entries of one look: those of a part of one tensor. The parts take turns. None
            (``null`` in YAML) looks at all frozen entries, before each change of masks too, and keeps a copy
            of them in the host's memory, by which it counts and finds what has changed.
        every: Looks are due at multiples of this many updates.
        operations: Whether each batch must meet the same operations; not for a model whose forward pass
            differs from batch to batch on purpose.
        on_difference: ``"stop"`` ends the run, ``"warn"`` gives a warning.
        seed: Where the turns begin.

    Raises:
        PolicyError: For a wrong argument.
        PromiseError: In training, for what is not as promised: it names the tensor, how many entries, and the
            step.
    """

    KEY = "gradpolicy_audit"

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        entries: int | None = 4096,
        every: int = 20,
        operations: bool = True,
        on_difference: str = "stop",
        seed: int = 0,
    ) -> None:
        key = "callbacks.audit"
        self.directory = directory
        self.entries = None if entries is None else check_whole(f"{key}.entries", entries, least=1)
        self.every = check_whole(f"{key}.every", every, least=1)
        self.operations = check_flag(f"{key}.operations", operations)
        self.on_difference = check_choice(f"{key}.on_difference", on_difference, ON_DIFFERENCE)
        self.seed = check_whole(f"{key}.seed", seed, least=0)
        self._reset()

    def _reset(self) -> None:
        self._policies: GradientPolicies | None = None
        self._frozen: FrozenIntervals | None = None
        self._stopped: StoppedBranches | None = None
        self._met: MetOperations | None = None
        self._former: dict[str, Any] = {}
        self._differences: list[dict[str, Any]] = []
        self._rank = 0
        # Whether a run goes on, and whether a look at flow policies is due in this batch.
        self._watches = self._looks = False
        # Updates at the last look, and the flow policies that hold since then.
        self._updates = -1
        self._active: list[str] = []

    # ---- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins anew for a fit."""
        if stage == TrainerFn.FITTING:
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch: policies are installed, and restored state is in place."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        found = [callback for callback in callbacks if isinstance(callback, GradientPolicies)]
        if not found:
            return
        self._policies, self._watches, self._rank = found[0], True, trainer.global_rank
        freezer, installed = found[0].freezer, found[0].installed
        if freezer is not None:
            seed = self.seed + trainer.global_rank
            self._frozen = FrozenIntervals(
                freezer, entries=self.entries, every=self.every, seed=seed, found=self._tell
            )
            self._frozen.counts.chosen = self._former.get("chosen", 0)
        if installed is not None:
            stops = [name for name, policy in found[0].flow_policies.items() if isinstance(policy, Stop)]
            self._stopped = StoppedBranches(installed, stops, dict(named_parameters(pl_module)))
            self._met = MetOperations(installed) if self.operations else None

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Notes which flow policies hold, where a look is due."""
        if not self._watches or self._policies is None:
            return
        updates = self._policies.updates(trainer)
        self._looks = self.entries is None or updates % self.every == 0
        if not self._looks:
            return
        if updates != self._updates:
            self._updates, epoch = updates, trainer.current_epoch
            self._active = [
                name
                for name, policy in self._policies.flow_policies.items()
                if policy.when.active(phase="fit", step=updates, epoch=epoch)
            ]
        if self._stopped is not None:
            self._stopped.begin_batch()
        if self._met is not None:
            self._met.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes looks where masks stay; other callbacks have begun the batch by now."""
        if self._looks and self._met is not None:
            self._met.end_backward()
        if self._frozen is not None:
            self._frozen.look()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Checks what flow policies did in the batch."""
        if not self._looks or self._policies is None:
            return
        if self._met is not None:
            self._tell(self._met.end_batch(self._updates, self._active))
        updates = self._policies.updates(trainer)
        if self._stopped is not None and updates > self._updates:
            # Under manual optimization gradients may be gone by now, or those of another loss.
            active = self._active if pl_module.automatic_optimization else ()
            self._tell(self._stopped.end_update(updates, active, self._frozen_names))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes a look, so that something is watched while other callbacks end an epoch or the training."""
        if self._frozen is not None:
            self._frozen.look(now=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares for the last time, after what other callbacks do when training ends; writes and prints."""
        self._compare_once_more(goes_on=False)
        total = self._total(trainer)
        self._stop_watching()
        if trainer.is_global_zero:
            report = self._write(trainer, total)
            if self._policies is not None and self._policies.policies:
                stops = any(isinstance(policy, Stop) for policy in self._policies.flow_policies.values())
                say(summary(report, stops=stops))
        self._raise_if(total["differences"])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what this process found. Others may be gone, so that nothing is gathered."""
        self._stop_watching()
        if self._differences or trainer.world_size == 1:
            self._write(trainer, self._own(trainer))

    def _compare_once_more(self, *, goes_on: bool) -> None:
        """Compares without raising, since other ranks wait to hear what this one found."""
        if self._frozen is not None and self._watches:
            self._note(self._frozen.look_once_more(goes_on=goes_on))

    def _stop_watching(self) -> None:
        if self._frozen is not None and self._watches:
            self._frozen.detach()
        self._watches = False

    # ---- differences

    def _note(self, differences: Sequence[Difference | FlowDifference]) -> None:
        for each in differences:
            self._differences.append(
                {
                    "tensor": each.tensor,
                    "what": each.what,
                    "policy": ", ".join(each.policies),
                    "count": each.count,
                    "step": each.step,
                    "rank": self._rank,
                    "indices": [list(index) for index in getattr(each, "indices", ())],
                    "message": str(each),
                }
            )
            if self.on_difference == "warn":
                warnings.warn(f"audit: {each}", stacklevel=2)

    def _tell(self, differences: Sequence[Difference | FlowDifference]) -> None:
        """Notes what was found in the middle of training, on this process alone."""
        self._note(differences)
        if differences:
            self._raise_if(self._differences)

    def _raise_if(self, differences: Sequence[dict[str, Any]]) -> None:
        if differences and self.on_difference == "stop":
            more = f" (and {len(differences) - 1} more in {FILE})" if len(differences) > 1 else ""
            raise PromiseError(f"audit: {differences[0]['message']}{more}")

    # ---- checkpoints and the file

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compares, and saves what was counted so far; Lightning calls this on all ranks."""
        self._compare_once_more(goes_on=True)
        checkpoint[self.KEY] = total = self._total(trainer)
        if self._watches:
            self._raise_if(total["differences"])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps what was counted before, until training starts."""
        if trainer.state.fn is TrainerFn.FITTING:
            former = checkpoint.get(self.KEY, {})
            if former:
                SavedCounts.model_validate(former)
            self._former = former

    def _own(self, trainer: Trainer) -> dict[str, Any]:
        """What this process counted; on rank 0 with what all had counted before the run was resumed."""
        frozen = Counts() if self._frozen is None else self._frozen.counts
        stopped = Checked() if self._stopped is None else self._stopped.counts
        met = Checked() if self._met is None else self._met.counts
        own: dict[str, Any] = {
            **asdict(frozen),
            "stopped_checked": stopped.checked,
            "stopped_nonzero": stopped.wrong,
            "operations_checked": met.checked,
            "operations_differing": met.wrong,
            "differences": list(self._differences),
        }
        former = self._former if trainer.is_global_zero else {}
        return merged([former, own]) if former else own

    def _total(self, trainer: Trainer) -> dict[str, Any]:
        """What all ranks counted; every rank must call this."""
        own = self._own(trainer)
        if trainer.world_size == 1:
            return own
        parts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(parts, own)
        return merged(parts)

    def _write(self, trainer: Trainer, total: dict[str, Any]) -> dict[str, Any]:
        report = described(total, sampled=self.entries is not None)
        directory = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f".{FILE}.{self._rank}.part"
        part.write_text(json.dumps(report, indent=2) + "\n")
        os.replace(part, directory / FILE)
        return report

    def _frozen_names(self) -> set[str]:
        """The parameters of which no entry trains."""
        freezer = self._policies.freezer if self._policies is not None else None
        return set() if freezer is None else {n for n in freezer.parameters if freezer.mask_of(n) is False}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks, or the parts of a resumed run, counted together."""
    total: dict[str, Any] = {key: sum(part[key] for part in parts) for key in SUMMED}
    total["chosen"] = max(part["chosen"] for part in parts)
    total["differences"] = [each for part in parts for each in part["differences"]]
    return total


def described(total: dict[str, Any], *, sampled: bool) -> dict[str, Any]:
    """The content of ``audit.json``.

    ``share`` is the share of the entries of tensors with frozen entries that were compared at a time.
    """
    return {
        "intervals": total["intervals"],
        "entries": total["entries"],
        "changed": total["changed"],
        "sampled": sampled,
        "share": total["watched"] / total["candidates"] if total["candidates"] else 1.0,
        "stopped_branches": {"checked": total["stopped_checked"], "nonzero": total["stopped_nonzero"]},
        "operations": {"checked": total["operations_checked"], "differing": total["operations_differing"]},
        "differences": total["differences"],
        "versions": {
            "gradpolicy": sys.modules["gradpolicy"].__version__,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
    }


def summary(report: dict[str, Any], *, stops: bool = False) -> str:
    """The line that is printed at the end.

    Args:
        report: The content of ``audit.json``.
        stops: Whether a policy stops gradients, so that something should have been looked at.

    Example:
        >>> zero = {"checked": 0}
        >>> summary({"intervals": 1284, "changed": 0, "stopped_branches": zero, "operations": zero})
        'frozen entries: 1,284 intervals, 0 changed'
    """
    stopped, operations = report["stopped_branches"], report["operations"]
    parts = [f"frozen entries: {_counted(report['intervals'], 'interval')}, {report['changed']:,} changed"]
    if stopped["checked"] or stops:
        found = f", {stopped['nonzero']:,} not zero" if stopped["checked"] else ""
        parts.append(f"stopped branches: {_counted(stopped['checked'], 'check')}{found}")
    if operations["checked"]:
        met = f"{_counted(operations['checked'], 'check')}, {operations['differing']:,} differing"
        parts.append(f"operations: {met}")
    return "; ".join(parts)


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
