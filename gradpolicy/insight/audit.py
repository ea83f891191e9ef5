"""The audit: checks that frozen entries keep their bits and that stopped gradients are zero."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from gradpolicy.checks import check_choice, check_whole
from gradpolicy.distributed.agreement import of_every_rank
from gradpolicy.errors import PolicyError, PromiseError
from gradpolicy.insight.audit_checks import FrozenEntries, StoppedBranches
from gradpolicy.insight.run_files import AUDIT, AuditDifference, AuditFile
from gradpolicy.insight.run_log import say
from gradpolicy.json_file import write_json
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.trainer_parts import callbacks_of
from gradpolicy.policies import Stop
from gradpolicy.where import named_parameters

ON_DIFFERENCE = ("stop", "warn")


class Audit(Callback):
    """Checks the guarantees of policies of :class:`~gradpolicy.GradientPolicies` during training.

    - Frozen entries keep their bits: weights, and optimizer state under ``frozen_state="keep"``. The bits of
      some entries are copied, and compared before the mask changes, every few updates, at each checkpoint,
      and at the end, after all other callbacks.
    - Gradients stopped by :class:`~gradpolicy.Stop` are exactly zero.

    At the end it prints one line, such as ``frozen entries: 1,284 intervals, 0 changed``, and writes
    ``audit.json``. Each process checks its own entries; rank 0 writes the sums. A resumed run continues from
    the counts of its checkpoint. The order of the callbacks does not matter.

    Args:
        directory: The directory of ``audit.json``; default: the trainer's.
        entries: The number of random entries of each tensor that are compared. None (``null`` in YAML)
            compares all frozen entries, also at each change of masks, with copies in the host's memory.
        every: Entries are compared, and new ones drawn, at multiples of this number of updates. Stopped
            branches are checked as often, or in each batch if `entries` is None.
        on_difference: ``"stop"`` ends the run, ``"warn"`` gives a warning.
        seed: The seed of the random entries.

    Raises:
        PolicyError: For a wrong argument.
        PromiseError: In training, if a check fails; names the tensor, the number of entries, and the step.
    """

    KEY = "gradpolicy_audit"

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        entries: int | None = 4096,
        every: int = 20,
        on_difference: str = "stop",
        seed: int = 0,
    ) -> None:
        key = "callbacks.audit"
        self.directory = directory
        self.entries = None if entries is None else check_whole(f"{key}.entries", entries, least=1)
        self.every = check_whole(f"{key}.every", every, least=1)
        self.on_difference = check_choice(f"{key}.on_difference", on_difference, ON_DIFFERENCE)
        self.seed = check_whole(f"{key}.seed", seed, least=0)
        self._reset()

    def _reset(self) -> None:
        self._policies: GradientPolicies | None = None
        self._frozen: FrozenEntries | None = None
        self._stopped: StoppedBranches | None = None
        self._before_resuming: AuditFile | None = None
        self._differences: list[AuditDifference] = []
        self._rank = 0
        self._running = False
        # The updates before this batch and the active stops, if the batch is audited.
        self._updates = 0
        self._active: list[str] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset all counts for a fit."""
        if stage == TrainerFn.FITTING:
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the checks, now that policies are installed and state is restored.

        Raises:
            PolicyError: Under DeepSpeed's stage 3.
        """
        policies = next(iter(callbacks_of(trainer, GradientPolicies)), None)
        if policies is None:
            return
        self._policies, self._running, self._rank = policies, True, trainer.global_rank
        if policies.freezer is not None:
            if any(hasattr(parameter, "ds_id") for parameter in policies.freezer.parameters.values()):
                raise PolicyError(
                    "callbacks.audit: DeepSpeed's stage 3 keeps no whole weights to compare; leave the audit "
                    "out, or use stage 1 or 2"
                )
            seed = self.seed + trainer.global_rank
            self._frozen = FrozenEntries(
                policies.freezer, entries=self.entries, every=self.every, seed=seed, report=self._report
            )
        if policies.installed is not None and (stops := self._stops()):
            self._stopped = StoppedBranches(policies.installed, stops, dict(named_parameters(pl_module)))

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Find the active stops, if the batch is audited."""
        if self._stopped is None or self._policies is None:
            return
        self._updates, self._active = self._policies.updates(trainer), None
        if self.entries is None or self._updates % self.every == 0:
            now: dict[str, Any] = {"phase": "fit", "step": self._updates, "epoch": trainer.current_epoch}
            self._active = [name for name, stop in self._stops().items() if stop.when.active(**now)]
            self._stopped.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare frozen entries if that is due; here other callbacks have already started the batch."""
        if self._frozen is not None:
            self._frozen.renew()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Check the stopped gradients of the batch."""
        if self._stopped is None or self._policies is None or self._active is None:
            return
        updates = self._policies.updates(trainer)
        if updates > self._updates:
            # Under manual optimization the gradients may be gone, or those of another loss.
            active = self._active if pl_module.automatic_optimization else ()
            self._report(self._stopped.end(updates, active))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start intervals, so that a write by another callback at the end of training is found."""
        if self._frozen is not None:
            self._frozen.renew(now=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare for the last time, after all other callbacks; write the file and print the result."""
        # No error before all ranks have counted.
        if self._frozen is not None and self._running:
            self._add(self._frozen.compare())
        total = self._total(trainer)
        self._stop_watching()
        if trainer.is_global_zero:
            self._write(trainer, total)
            if self._policies is not None and self._policies.policies:
                say(summary(total, stops=bool(self._stops())))
        self._raise_if(total.differences)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the counts of this process; others may be gone, so nothing is gathered."""
        self._stop_watching()
        if self._differences or trainer.world_size == 1:
            self._write(trainer, self._own(trainer))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare, and save the counts so far; Lightning calls this on all ranks."""
        if self._frozen is not None and self._running:
            self._add(self._frozen.compare())
            self._frozen.continue_from_checkpoint()
        total = self._total(trainer)
        checkpoint[self.KEY] = total.model_dump()
        if self._running:
            self._raise_if(total.differences)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the counts from before the run was resumed."""
        if trainer.state.fn is TrainerFn.FITTING and self.KEY in checkpoint:
            self._before_resuming = AuditFile.model_validate(checkpoint[self.KEY], strict=True)

    def _stops(self) -> dict[str, Stop]:
        policies = {} if self._policies is None else self._policies.flow_policies
        return {name: policy for name, policy in policies.items() if isinstance(policy, Stop)}

    def _stop_watching(self) -> None:
        if self._frozen is not None and self._running:
            self._frozen.detach()
        self._running = False

    def _add(self, differences: Iterable[AuditDifference]) -> None:
        for each in differences:
            self._differences.append(each.model_copy(update={"rank": self._rank}))
            if self.on_difference == "warn":
                warnings.warn(f"audit: {each.message}", stacklevel=2)

    def _report(self, differences: Sequence[AuditDifference]) -> None:
        """Handle a difference that this process found during training."""
        self._add(differences)
        if differences:
            self._raise_if(self._differences)

    def _raise_if(self, differences: Sequence[AuditDifference]) -> None:
        if differences and self.on_difference == "stop":
            more = f" (and {len(differences) - 1} more in {AUDIT})" if len(differences) > 1 else ""
            raise PromiseError(f"audit: {differences[0].message}{more}")

    def _own(self, trainer: Trainer) -> AuditFile:
        """Return the counts of this process; on rank 0 including those from before the run was resumed."""
        frozen, stopped = self._frozen, self._stopped
        own = AuditFile(
            intervals=frozen.intervals if frozen else 0,
            entries=frozen.compared if frozen else 0,
            changed=frozen.changed if frozen else 0,
            sampled=self.entries is not None,
            stopped_branches=stopped.counts if stopped else {"checked": 0, "nonzero": 0},
            differences=self._differences,
        )
        before = self._before_resuming if trainer.is_global_zero else None
        return own if before is None else merged([own, before])

    def _total(self, trainer: Trainer) -> AuditFile:
        """Return the counts of all ranks; every rank must call this."""
        return merged(of_every_rank(self._own(trainer)))

    def _write(self, trainer: Trainer, total: AuditFile) -> None:
        directory = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / AUDIT, total.model_dump(mode="json"))


def merged(parts: Sequence[AuditFile]) -> AuditFile:
    """Return the sum of the counts of several ranks, or of the parts of a resumed run."""
    return AuditFile(
        intervals=sum(each.intervals for each in parts),
        entries=sum(each.entries for each in parts),
        changed=sum(each.changed for each in parts),
        sampled=parts[0].sampled,
        stopped_branches={
            key: sum(each.stopped_branches[key] for each in parts) for key in ("checked", "nonzero")
        },
        differences=[difference for each in parts for difference in each.differences],
    )


def summary(report: AuditFile, *, stops: bool = False) -> str:
    """Return the line that is printed at the end.

    Args:
        report: The content of ``audit.json``.
        stops: True if a policy stops gradients, so that checks are expected.

    Example:
        >>> summary(AuditFile(intervals=1284, entries=9000, changed=0, sampled=True))
        'frozen entries: 1,284 intervals, 0 changed'
    """
    stopped = report.stopped_branches
    parts = [f"frozen entries: {_counted(report.intervals, 'interval')}, {report.changed:,} changed"]
    if stopped["checked"] or stops:
        found = f", {stopped['nonzero']:,} not zero" if stopped["checked"] else ""
        parts.append(f"stopped branches: {_counted(stopped['checked'], 'check')}{found}")
    return "; ".join(parts)


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
