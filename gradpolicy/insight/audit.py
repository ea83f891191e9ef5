"""The audit: checks that frozen entries keep their bits."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, PromiseError
from gradpolicy.files import write_json
from gradpolicy.freezing import Freezer
from gradpolicy.insight.run_files import AUDIT, AuditFile
from gradpolicy.insight.run_log import say
from gradpolicy.optim.shapes import local_mask
from gradpolicy.tensors.mask import as_tensor
from gradpolicy.tensors.seeded import derive
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.train.agreement import of_every_rank
from gradpolicy.train.lightning.callback import GradientPolicies
from gradpolicy.train.lightning.resume import starts_new_run
from gradpolicy.train.lightning.trainer_parts import callbacks_of

# The smallest number of updates between copies, since finding out which entries are frozen takes time.
EVERY = 20
# Of a parameter: the number of updates, flat indices of frozen entries, and their bytes.
Snapshot = tuple[int, Tensor, Tensor]


class Audit(Callback):
    """Checks that frozen weights keep their bits under :class:`~gradpolicy.GradientPolicies`.

    As a mask is set, at most every 20 updates, the bits of random frozen entries of the tensor are copied.
    They are compared before the mask changes, at each checkpoint, and after all other callbacks have ended
    training.

    At the end it prints one line, such as ``frozen entries: 1,284 intervals, 0 changed``, and writes
    ``audit.json``. Each process checks its own entries; rank 0 writes the sums. A resumed run continues from
    the counts of its checkpoint. The order of the callbacks does not matter.

    Args:
        directory: The directory of ``audit.json``; default: the trainer's.
        entries: The number of random entries of each tensor that are compared.

    Raises:
        PolicyError: For a wrong argument, and under DeepSpeed's stage 3.
        PromiseError: In training, if an entry changed; names the tensor, the number of entries, and the step.
    """

    KEY = "gradpolicy_audit"

    def __init__(self, directory: str | Path | None = None, *, entries: int = 4096) -> None:
        self.directory = directory
        self.entries = check_integer("callbacks.audit.entries", entries, least=1)
        self._reset()

    def _reset(self) -> None:
        self._freezer: Freezer | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._next_copy = 0
        self._counted, self._rank = merged([]), 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset all counts for a fit."""
        if stage == TrainerFn.FITTING:
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe masks, now that policies are installed."""
        policies = next(iter(callbacks_of(trainer, GradientPolicies)), None)
        self._rank = trainer.global_rank
        if policies is None or not policies.run.freezer.policies:
            return
        self._freezer = policies.run.freezer
        self._freezer.observers.append(self)
        if any(hasattr(parameter, "ds_id") for parameter in self._freezer.parameters.values()):
            raise PolicyError(
                "callbacks.audit: DeepSpeed's stage 3 keeps no full weights: leave the audit out"
            )

    def before_masks(self, names: Collection[str]) -> None:
        """Compare entries of parameters whose masks are about to change."""
        self._compare(names)
        _raise_if(self._counted)

    def after_masks(self, names: Collection[str]) -> None:
        """Do nothing: entries are copied after the backward pass."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy entries under new masks; here all callbacks have started the batch, and none has ended it."""
        if self._freezer is not None and _updates(self._freezer) >= self._next_copy:
            self._next_copy = _updates(self._freezer) + EVERY
            self._take(self._freezer.parameters.keys() - self._snapshots.keys())

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare, and save the counts so far; Lightning calls this on all ranks."""
        names = [*self._snapshots]
        self._compare(names)
        self._take(names)
        # As in a run that is resumed from here.
        self._next_copy = 0
        total = merged(of_every_rank(self._counted))
        checkpoint[self.KEY] = total.model_dump()
        _raise_if(total)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the counts from before the run was resumed."""
        goes_on = trainer.state.fn is TrainerFn.FITTING and not starts_new_run(trainer)
        if goes_on and trainer.is_global_zero and self.KEY in checkpoint:
            self._counted = AuditFile.model_validate(checkpoint[self.KEY], strict=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare for the last time, after all other callbacks; write the file and print the result."""
        self._compare([*self._snapshots])
        # No error before all ranks have counted.
        total = merged(of_every_rank(self._counted))
        if trainer.is_global_zero:
            self._write(trainer, total)
            if self._freezer is not None:
                say(f"frozen entries: {total.intervals:,} intervals, {total.changed:,} changed")
        self._detach()
        _raise_if(total)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the counts of this process; others may be gone, so nothing is gathered."""
        # After the fit the file has the counts of all processes.
        if self._freezer is not None and (self._counted.differences or trainer.world_size == 1):
            self._write(trainer, self._counted)
        self._detach()

    def _detach(self) -> None:
        if self._freezer is not None:
            self._freezer.observers.remove(self)
        self._freezer = None

    def _write(self, trainer: Trainer, total: AuditFile) -> None:
        directory = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / AUDIT, total.model_dump(mode="json"))

    # ---- entries

    @torch.no_grad()
    def _take(self, names: Collection[str]) -> None:
        """Copy the bits of frozen entries of these parameters."""
        if (freezer := self._freezer) is None:
            return
        for name in names:
            local = local_shard(freezer.parameters[name].detach())
            indices = self._frozen_indices(freezer, name)
            self._counted.sampled |= bool(len(indices)) and local.numel() > self.entries
            self._snapshots[name] = _updates(freezer), indices, bits_at(local, indices)

    @torch.no_grad()
    def _compare(self, names: Collection[str]) -> None:
        """Compare the entries of these parameters with their copies, which are discarded."""
        if (freezer := self._freezer) is None:
            return
        for name in self._snapshots.keys() & names:
            since, indices, bits = self._snapshots.pop(name)
            now = bits_at(local_shard(freezer.parameters[name].detach()), indices).to(bits.device)
            changed, step = int((now != bits).any(1).sum()), _updates(freezer)
            # It is no interval if masks are set twice between two updates.
            if len(indices) and (changed or step > since):
                self._counted.intervals += 1
                self._counted.entries += len(indices)
                self._counted.changed += changed
            if changed:
                policies = [p for p, each in freezer.policies.items() if name in each.parameters]
                self._counted.differences.append(
                    f"{name} (policy.{', policy.'.join(policies)}): {changed} of {len(indices)} frozen "
                    f"entries changed between update {since} and update {step} on rank {self._rank}; "
                    "something other than the masked optimizer wrote to them"
                )

    def _frozen_indices(self, freezer: Freezer, name: str) -> Tensor:
        """Return flat indices of random frozen entries in this process's shard of a parameter."""
        parameter, mask = freezer.parameters[name], freezer.mask_of(name)
        local = local_shard(parameter)
        if local.numel() <= self.entries:
            indices = torch.arange(local.numel(), device=local.device)
        else:
            generator = torch.Generator("cpu").manual_seed(
                derive("audit", self._rank, name, _updates(freezer))
            )
            drawn = torch.randint(local.numel(), (self.entries,), generator=generator, device="cpu")
            indices = drawn.unique().to(local.device)
        active = as_tensor(mask, parameter.shape, local.device)
        active = local_mask(active.reshape((1,) * (local.dim() - active.dim()) + active.shape), parameter)
        return indices[~active.expand(local.shape).reshape(-1)[indices]]


def _updates(freezer: Freezer) -> int:
    return max(each.effective_steps for each in freezer.optimizers)


def bits_at(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the bytes of entries, so that 0.0 and −0.0 differ and NaN equals itself.

    Example:
        >>> bits_at(torch.tensor([0.0, 1.0, -0.0]), torch.tensor([0, 2])).tolist()
        [[0, 0, 0, 0], [0, 0, 0, 128]]
    """
    # Lightning has moved the model to the CPU when a fit ends.
    return tensor.reshape(-1)[indices.to(tensor.device), None].view(torch.uint8)


def merged(parts: Sequence[AuditFile]) -> AuditFile:
    """Return the sum of the counts of several ranks, or of the sections of a resumed run."""
    return AuditFile(
        intervals=sum(each.intervals for each in parts),
        entries=sum(each.entries for each in parts),
        changed=sum(each.changed for each in parts),
        sampled=any(each.sampled for each in parts),
        differences=[difference for each in parts for difference in each.differences],
    )


def _raise_if(found: AuditFile) -> None:
    if found.differences:
        raise PromiseError(f"audit: {'; '.join(found.differences[:3])}")
