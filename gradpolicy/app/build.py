"""Checks what a config names, and the arguments, and builds the parts of a run.

The check is by signatures, so that it refuses `trainer.max_epoch` and `optimizer.lr=abc` before anything
runs, for any `_target_`. :func:`hydra.utils.instantiate` builds. Lightning is imported in functions, so that
a wrong argument of a policy is reported at once.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from gradpolicy.app.messages import LINE, root_cause, type_error
from gradpolicy.errors import (
    NAMED,
    KnowsItsArguments,
    PolicyError,
    brief,
    known_arguments,
    nearest,
    under,
)
from gradpolicy.imports import import_by_name, to_install
from gradpolicy.masks import MaskSource
from gradpolicy.policies import Policy
from gradpolicy.presets import FrozenAttention, FrozenNorms

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger

    from gradpolicy.train.lightning.callback import GradientPolicies

TARGET = "_target_"
# Hydra's own keys of a node.
OWN_KEYS = (TARGET, "_partial_", "_recursive_", "_convert_", "_args_")
PLAIN = (str, int, float, bool, type(None))
# The nodes of a group; a removed one is null.
Nodes = Mapping[str, Mapping[str, Any] | None] | None


# ---- checking


def check_arguments(config: Any, key: str) -> None:
    """Check every `_target_` and its arguments in a part of the resolved config.

    Args:
        config: The part.
        key: Its key in the config.

    Raises:
        PolicyError: For a target that does not exist, an unknown argument, or a value of the wrong type.
    """
    if isinstance(config, list):
        for index, value in enumerate(config):
            check_arguments(value, f"{key}[{index}]")
    elif isinstance(config, Mapping):
        for name, value in config.items():
            check_arguments(value, f"{key}.{name}")
        if TARGET in config:
            with under(f"{key}.{TARGET}"):
                target = import_by_name(str(config[TARGET]))
            _check_call(target, config, key)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function or class; None if Python does not know them."""
    # An annotation may use a name that is imported for type checking only.
    for evaluated in (True, False):
        with suppress(NameError, TypeError, ValueError):
            return inspect.signature(function, eval_str=evaluated).parameters
    return None


def _check_call(target: Callable[..., Any], config: Mapping[str, Any], key: str) -> None:
    parameters = _parameters(target)
    if parameters is None:
        return
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = [name for name, each in parameters.items() if each.kind in NAMED]
    # Policies, mask sources and schedules check the values themselves.
    checks_itself = isinstance(target, type) and issubclass(target, KnowsItsArguments | MaskSource)
    if checks_itself:
        takes_any, known = False, known_arguments(target)  # type: ignore[arg-type]
    for name, value in config.items():
        full_key = brief(f"{key}.{name}")
        if name not in known and name not in OWN_KEYS and not takes_any:
            raise PolicyError(f"{full_key}: {config[TARGET]} takes no such argument; {nearest(name, known)}")
        if name in known and not checks_itself:
            annotation, default = parameters[name].annotation, parameters[name].default
            checkable = annotation is not inspect.Parameter.empty and not isinstance(annotation, str)
            if checkable and value != default and not _has_target(value):
                check_value(full_key, annotation, value)


def check_value(key: str, annotation: Any, value: Any) -> None:
    """Check a value from a config against an annotation; strings are not converted to numbers.

    Raises:
        PolicyError: If it does not match; names the expected types.

    Example:
        >>> check_value("betas", tuple[float, float], [0.9, 1])
        >>> check_value("lr", float, "abc")
        Traceback (most recent call last):
        gradpolicy.errors.PolicyError: lr: must be a valid number, got 'abc'
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError):
        return
    problems: list[Any] = []
    # YAML has no tuples, so a list is accepted for one. Nothing else is converted.
    for strict in (True, False) if not isinstance(value, PLAIN) else (True,):
        try:
            adapter.validate_python(value, strict=strict)
        except PydanticUserError:
            # Pydantic does not support a class of the annotation, such as a config of transformers.
            return
        except ValidationError as error:
            problems = error.errors()
        else:
            return
    raise type_error(key, problems)


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return TARGET in value or any(_has_target(item) for item in value.values())
    return isinstance(value, list) and any(_has_target(item) for item in value)


# ---- building


def build(node: Mapping[str, Any], key: str, kind: type = object, **arguments: Any) -> Any:
    """Build the object of a node of the resolved config, by :func:`hydra.utils.instantiate`.

    Args:
        node: The node, with its ``_target_``.
        key: Its key in the config.
        kind: The class of the result.
        **arguments: Further arguments of the target.

    Raises:
        PolicyError: If building fails, or the result has the wrong type; has the key of the innermost node
            that failed, and the cause.
    """
    if TARGET not in node:
        raise PolicyError(f"{key}: needs a {TARGET}, the path of a class")
    try:
        built = instantiate(OmegaConf.create({**node, "_partial_": True, "_convert_": "all"}))
        if not node.get("_partial_"):
            built = built(**arguments)
    except Exception as error:
        raise _under_key(error, key) from error
    parts = built.values() if isinstance(built, FrozenAttention | FrozenNorms) else [built]
    if not all(isinstance(each, kind) for each in parts):
        raise PolicyError(f"{key}: must be a {kind.__name__}, got {type(built).__name__}")
    return built


def build_all(nodes: Nodes, key: str, kind: type) -> dict[str, Any]:
    """Build each node of a group."""
    return {
        name: build(node, f"{key}.{name}", kind) for name, node in (nodes or {}).items() if node is not None
    }


def _under_key(error: Exception, key: str) -> PolicyError:
    # Hydra ends its message with the key of a node within this one.
    inner = re.search(r"\nfull_key: (\S+)$", str(error))
    key = f"{key}.{inner[1]}" if inner else key
    cause = root_cause(error)
    if isinstance(cause, ModuleNotFoundError):
        return PolicyError(f"{key}: {to_install(cause)}")
    message = brief(str(cause), most=LINE)
    if isinstance(cause, PolicyError):
        return PolicyError(_message_at(key, message))
    # Lightning's messages are clear without their type; a KeyError is not.
    kind = [] if type(cause).__name__ == "MisconfigurationException" else [type(cause).__name__]
    return PolicyError(": ".join([key, *kind, *([message] if message else [])]))


def _message_at(key: str, message: str) -> str:
    """Prefix a message by a key: ``Stop.mode: …`` at ``policy.cut`` becomes ``policy.cut.mode: …``.

    So does ``when.phases: …`` at ``policy.cut.when``.
    """
    owner, _, rest = message.partition(": ")
    class_name, _, argument = owner.partition(".")
    own = class_name[:1].isupper() or class_name == key.split(".")[-1]
    if own and argument.isidentifier():
        return f"{key}.{argument}: {rest}"
    return f"{key}: {message}"


# ---- the parts of a run


@dataclass
class Subject:
    """The data, the model, and the policies that act on it."""

    data: "LightningDataModule"
    model: "LightningModule"
    policies: "GradientPolicies"


def build_subject(container: Mapping[str, Any]) -> Subject:
    """Build the data module, the model and the policies of a resolved config.

    Raises:
        PolicyError: If one cannot be built, or has the wrong type.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    from gradpolicy.train.lightning.callback import GradientPolicies

    return Subject(
        build(container["data"], "data", LightningDataModule),
        build(container["model"], "model", LightningModule),
        GradientPolicies(build_all(container.get("policy"), "policy", Policy), seed=container["seed"]),
    )


def build_callbacks(nodes: Nodes, trainer: Mapping[str, Any]) -> list["Callback"]:
    """Build the callbacks, without those that the trainer's flags disable, and a progress bar."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar, RichProgressBar

    # Lightning raises an error for callbacks that its own flags disable.
    switches = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
    off = tuple(kind for switch, kind in switches.items() if trainer.get(switch) is False)
    built = build_all(nodes, "callbacks", Callback).values()
    chosen = [callback for callback in built if not isinstance(callback, off)]
    if ProgressBar not in off and not any(isinstance(callback, ProgressBar) for callback in chosen):
        chosen.append(RichProgressBar())
    # The best checkpoint first, whose path is saved in the checkpoint to resume from.
    return sorted(chosen, key=lambda each: isinstance(each, ModelCheckpoint) and each.monitor is None)


def build_trainer(
    node: Mapping[str, Any], callbacks: Iterable["Callback"], loggers: Iterable["Logger"]
) -> "Trainer":
    """Build the trainer, whose checkpoints are complete or absent.

    Raises:
        PolicyError: If the strategy is DeepSpeed's.
    """
    from lightning.pytorch import Trainer

    from gradpolicy.train.lightning.trainer_parts import DEEPSPEED

    trainer: Trainer = build(
        {key: value for key, value in node.items() if key != "plugins"},
        "trainer",
        Trainer,
        callbacks=[*callbacks],
        logger=[*loggers] or False,
        plugins=build_plugins(node.get("plugins")),
    )
    if isinstance(trainer.strategy, DEEPSPEED):
        raise PolicyError(
            "trainer.strategy: DeepSpeed writes directories, which a run cannot check and resume from; use "
            "trainer=fsdp2, or give gradpolicy.GradientPolicies to a Trainer of your own"
        )
    return trainer


def build_plugins(nodes: Any) -> list[Any]:
    """Build the trainer's plugins, with AtomicCheckpointIO unless the config names another CheckpointIO."""
    from lightning.pytorch.plugins import CheckpointIO

    from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO

    nodes = [] if nodes is None else nodes if isinstance(nodes, list) else [nodes]
    plugins = [
        build(node, f"trainer.plugins[{index}]") if isinstance(node, Mapping) else node
        for index, node in enumerate(nodes)
    ]
    has_own = any(isinstance(plugin, CheckpointIO) for plugin in plugins)
    return plugins if has_own else [*plugins, AtomicCheckpointIO()]
