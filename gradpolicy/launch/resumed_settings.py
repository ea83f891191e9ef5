"""The settings that a checkpoint decides when a run resumes from it: other ones are refused by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradpolicy.errors import brief, shown
from gradpolicy.launch.config import Settings
from gradpolicy.lightning.checkpoint_checks import setting_differs
from gradpolicy.lightning.checkpoint_reading import SETTINGS, read_checkpoint

ABSENT = object()
# Classes of callbacks, each with the argument that its state in a checkpoint replaces.
RESTORED_ARGUMENTS = {"InitialWeights": "path", "EarlyStopping": "patience"}


class SaveSettings(Callback):
    """Saves in each checkpoint the settings that a run resumed from it must share.

    Args:
        settings: The config of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = held_settings(settings)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds them."""
        checkpoint[SETTINGS] = self.settings


def held_settings(settings: Settings) -> dict[str, Any]:
    """The values that a checkpoint holds too, by their keys: those of the run would not count beside them.

    A checkpoint restores the options of the optimizer, the state of schedulers, the weights that a model
    began with, the patience of early stopping, masks and what their sources remember, and random states.

    Args:
        settings: The config.
    """
    policies = {name: node for name, node in (settings.policy or {}).items() if node and "mask" in node}
    callbacks = {
        name: {argument: node.get(argument)}
        for name, node in (settings.callbacks or {}).items()
        for kind, argument in RESTORED_ARGUMENTS.items()
        if node and str(node.get("_target_")).endswith(f".{kind}")
    }
    held = {
        "seed": settings.seed,
        "optimizer": settings.optimizer,
        # Shown under `optimizer`, to which it refers.
        "model": {
            name: value
            for name, value in settings.model.items()
            if name != "optimizer" or value != settings.optimizer
        },
        "policy": policies,
        "callbacks": callbacks,
    }
    return dict(_values(held, ""))


def check_settings(checkpoint: Path, settings: Settings) -> None:
    """Makes sure that the config of a run that is resumed is what it will train with.

    Policies may be added and taken away: those that are in one of the two alone are not compared.

    Args:
        checkpoint: What the run is resumed from. One without settings, of another program, is not compared.
        settings: The config of the run.

    Raises:
        PolicyError: For a setting that the checkpoint decides, and that is another in the config.
    """
    saved: Any = read_checkpoint(checkpoint).get(SETTINGS)
    if not isinstance(saved, Mapping):
        return
    given = held_settings(settings)
    for key in [*given, *(key for key in saved if key not in given)]:
        here, there = given.get(key, ABSENT), saved.get(key, ABSENT)
        if here == there or not _compared(str(key), given, saved):
            continue
        name = brief(str(key))
        more = ", or give the policy another name" if name.startswith("policy.") else ""
        raise setting_differs(name, _told(here), _told(there), more)


def _compared(key: str, given: Mapping[str, Any], saved: Mapping[Any, Any]) -> bool:
    group, _, name = key.partition(".")
    if group == "callbacks":
        # Without the callback there is nothing to replace. One that is new begins without a state, but first
        # weights would be replaced by those of the checkpoint.
        return key in given and (key in saved or key.endswith(".path"))
    node = f"{group}.{name.partition('.')[0]}."
    return group != "policy" or all(
        any(str(each).startswith(node) for each in keys) for keys in (given, saved)
    )


def _values(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value below a node that is no mapping, with its key."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _told(value: Any) -> str:
    return "nothing" if value is ABSENT else shown(value)
