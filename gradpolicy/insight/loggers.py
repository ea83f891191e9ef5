"""Lightning's loggers for dashboards: a section for each policy, without charts of what never changes."""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

PREFIXES = ("policy/", "test/policy/")


class VaryingOnly(Logger):
    """Writes a number of a policy only once it has changed, from its first step on.

    A policy that always holds, with operations that are met in each step, would fill a dashboard with flat
    lines. A logger of files keeps them.
    """

    # Without an __init__ of its own, so that a logger's arguments are its base class's.
    @cached_property
    def _constant(self) -> dict[str, tuple[float, int | None, int | None]]:
        """The value of each number that never changed, with its first step and its newest."""
        return {}

    @cached_property
    def _varying(self) -> set[str]:
        return set()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes all but what has not changed yet, on the first rank."""
        written = {}
        for name, value in metrics.items():
            if not name.startswith(PREFIXES) or name in self._varying:
                written[name] = value
                continue
            if name not in self._constant:
                self.hold_back(name, value)
            former, first, newest = self._constant.get(name, (value, step, step))
            if value == former:
                self._constant[name] = (value, first, step)
                continue
            for earlier in dict.fromkeys((first, newest)):
                super().log_metrics({name: former}, earlier)  # type: ignore[safe-super]
            self._varying.add(name)
            written[name] = value
        if written:
            super().log_metrics(written, step)  # type: ignore[safe-super]

    def hold_back(self, name: str, value: float) -> None:
        """Called once for a number that is not written."""


class MLFlowLogger(VaryingOnly, loggers.MLFlowLogger):
    """Lightning's ``MLFlowLogger``, without charts of what never changes."""


class TensorBoardLogger(VaryingOnly, loggers.TensorBoardLogger):
    """Lightning's ``TensorBoardLogger``: what changes of a policy has a section of *Custom scalars*."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds to the layout what has begun to change: TensorBoard goes by the one written last."""
        known = len(self._varying)
        super().log_metrics(metrics, step)
        if len(self._varying) > known:
            self.experiment.add_custom_scalars(custom_scalars(self._varying))


def custom_scalars(varying: Iterable[str] = ()) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's layout: losses and accuracies together, then a section for each policy.

    Args:
        varying: The numbers of policies that have a chart.

    Example:
        >>> list(custom_scalars({"policy/half/active_share", "policy/half/update_size"})["policy half"])
        ['active share', 'update size']
    """
    layout: dict[str, dict[str, list[Any]]] = {
        "results": {
            name: ["Multiline", [rf"(train|val|test)/(.*_)?{name}(_step|_epoch)?$"]]
            for name in ("loss", "accuracy")
        }
    }
    charted = [name for name in varying if name.startswith("policy/")]
    for policy, quantity in sorted(name.removeprefix("policy/").rsplit("/", 1) for name in charted):
        # Norms before and after share a chart.
        stem = re.sub("_(before|after)$", "", quantity)
        tags = rf"policy/{re.escape(policy)}/{stem}(_before|_after)?$"
        layout.setdefault(f"policy {policy}", {})[stem.replace("_", " ")] = ["Multiline", [tags]]
    return layout


class _SectionForEachPolicy(loggers.WandbLogger):
    """Keeps the numbers of a policy together: W&B's sections go by what is before the first slash."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs under the names that W&B has."""
        super().log_metrics({in_wandb(name): value for name, value in metrics.items()}, step)


class WandbLogger(VaryingOnly, _SectionForEachPolicy):
    """Lightning's ``WandbLogger``: a section for each policy; what never changes is in a run's summary."""

    def hold_back(self, name: str, value: float) -> None:
        """Puts the number into the summary, by which runs can be sorted and filtered."""
        self.experiment.summary[in_wandb(name)] = value


def in_wandb(name: str) -> str:
    """What W&B calls a metric.

    Example:
        >>> in_wandb("policy/half/update_size"), in_wandb("train/loss")
        ('policy_half/update_size', 'train/loss')
    """
    return re.sub("^(test/)?policy/", r"\1policy_", name)
