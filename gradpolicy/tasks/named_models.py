"""Image classifiers of timm and torchvision, by name; these packages are needed only when one is named."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gradpolicy.checkpoint_file import read_file
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.tasks.images import ImageShape, Normalized

EXTRA = "vision"


@dataclass(frozen=True)
class NamedModel:
    """A classifier with what it takes and what its classes are called.

    Attributes:
        model: Takes images in [0, 1].
        network: The network within, whose modules have the names its package gives them.
        shape: Of the images.
        classes: Names of the classes, where they are known.
    """

    model: nn.Module
    network: nn.Module
    shape: ImageShape
    classes: tuple[str, ...] | None = None


def load_named_model(name: str, weights: str | None = None) -> NamedModel:
    """Loads a classifier.

    Args:
        name: ``timm:NAME`` or ``torchvision:NAME``.
        weights: A file with a state dict; None: the package's own, downloaded where they are not yet there;
            ``"none"``: random ones.

    Raises:
        PolicyError: If the package is not installed, has no such model, or the weights cannot be had.
    """
    package, _, model = name.partition(":")
    if package not in LOADERS or not model:
        raise PolicyError(f"model: {shown(name)} given; timm:NAME or torchvision:NAME needed")
    try:
        found = LOADERS[package](_package(package, name), model, weights is None)
    except (OSError, RuntimeError) as error:
        raise PolicyError(
            f"model: the weights of {name} cannot be had: {error}; name a file: weights=…"
        ) from error
    if weights not in (None, "none"):
        _load_weights(found.network, Path(str(weights)))
    return found


def _package(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise PolicyError(
            f"model: {name} needs {package}, which cannot be imported ({error});"
            f" install it: pip install 'gradpolicy[{EXTRA}]'"
        ) from error


def _from_timm(timm: Any, name: str, pretrained: bool) -> NamedModel:
    if name not in timm.list_models():
        raise unknown("timm model", name, timm.list_models(), key="model")
    network = timm.create_model(name, pretrained=pretrained)
    data = timm.data.resolve_model_data_config(network)
    classes = None
    if network.num_classes == 1000:
        info = timm.data.ImageNetInfo()
        classes = tuple(info.index_to_description(index).split(",")[0] for index in range(1000))
    return NamedModel(
        Normalized(network, data["mean"], data["std"]), network, ImageShape(*data["input_size"]), classes
    )


def _from_torchvision(torchvision: Any, name: str, pretrained: bool) -> NamedModel:
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise unknown("torchvision model", name, names, key="model")
    weights = torchvision.models.get_model_weights(name).DEFAULT
    network = torchvision.models.get_model(name, weights=weights if pretrained else None)
    preprocessing = weights.transforms()
    size = preprocessing.crop_size[0]
    return NamedModel(
        Normalized(network, preprocessing.mean, preprocessing.std),
        network,
        ImageShape(3, size, size),
        tuple(weights.meta["categories"]),
    )


LOADERS = {"timm": _from_timm, "torchvision": _from_torchvision}


def _load_weights(network: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise PolicyError(f"weights: {path} does not exist")
    content = read_file(path, "weights")
    try:
        network.load_state_dict(content.get("state_dict", content))
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise PolicyError(f"weights: {path} does not fit the model: {' '.join(lines[:2])}") from error
