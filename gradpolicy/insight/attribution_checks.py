"""Checks of attributions: insertion and deletion of pixels, and randomisation of weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError
from gradpolicy.insight.attribution import Forward, Target, blur, predict

Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""An attribution method as a function of a model, images and classes."""


@dataclass(frozen=True)
class PixelCurves:
    """The probability of a class as pixels are inserted into a blurred image, or deleted from the image.

    Attributes:
        shares: The shares of changed pixels, shape (steps + 1,).
        insertion: The probability after inserting these, shape (batch, steps + 1).
        deletion: The probability after deleting these, of the same shape.
    """

    shares: Tensor
    insertion: Tensor
    deletion: Tensor

    @property
    def insertion_area(self) -> Tensor:
        """The area below each insertion curve, shape (batch,), from 0 to 1. Higher is better."""
        return torch.trapezoid(self.insertion, self.shares)

    @property
    def deletion_area(self) -> Tensor:
        """The area below each deletion curve, shape (batch,), from 0 to 1. Lower is better."""
        return torch.trapezoid(self.deletion, self.shares)


def insertion_deletion(
    forward: Forward, images: Tensor, attribution: Tensor, target: Target = None, *, steps: int = 20
) -> PixelCurves:
    """Insert and delete the pixels of images, those with the largest attribution first.

    The attribution of a pixel is the magnitude of the sum over its channels. Deleted pixels get their value
    in a blurred copy of the image, and pixels are inserted into that copy.

    Args:
        forward: A function that returns class logits of images.
        images: Images of shape (batch, channels, height, width).
        attribution: The attribution, of the same shape.
        target: A class for all images or one for each; default: the predicted ones.
        steps: The number of steps in which the pixels are changed.

    Raises:
        PolicyError: If the shapes differ, or `steps` is not an integer above 0.

    Source: Petsiuk, Das, Saenko 2018, arXiv:1806.07421.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
        >>> images = torch.rand(3, 1, 4, 4)
        >>> insertion_deletion(model, images, torch.rand(3, 1, 4, 4), steps=4).insertion.shape
        torch.Size([3, 5])
    """
    check_whole("insertion_deletion.steps", steps, least=1)
    if images.dim() != 4 or images.shape != attribution.shape:
        raise PolicyError(
            f"insertion_deletion: images of shape {tuple(images.shape)} and an attribution of shape "
            f"{tuple(attribution.shape)}; both must be (batch, channels, height, width)"
        )
    classes, _ = predict(forward, images, target)
    strength = attribution.detach().sum(dim=1).abs().flatten(1)
    # The rank of each pixel in the order of changes.
    ranks = strength.argsort(dim=1, descending=True).argsort(dim=1).view(-1, 1, *images.shape[-2:])
    shares = torch.linspace(0, 1, steps + 1, device="cpu")
    blurred, pixels = blur(images), images.shape[-2] * images.shape[-1]
    curves: dict[str, list[Tensor]] = {"insertion": [], "deletion": []}
    for share in shares:
        changed = ranks < torch.round(share * pixels).item()
        for name, new, old in (("insertion", images, blurred), ("deletion", blurred, images)):
            curves[name].append(predict(forward, torch.where(changed, new, old), classes)[1].cpu())
    return PixelCurves(shares, torch.stack(curves["insertion"], 1), torch.stack(curves["deletion"], 1))


class Randomised(NamedTuple):
    """An attribution after the weights of a layer, and of all layers after it, were randomised.

    Attributes:
        layer: The layer's name.
        attribution: The attribution, of the images' shape.
        similarity: Its rank correlation with that of the trained model, from -1 to 1, shape (batch,).
    """

    layer: str
    attribution: Tensor
    similarity: Tensor


def randomisation_check(
    explain: Explain, model: nn.Module, images: Tensor, target: Tensor, *, seed: int = 0
) -> list[Randomised]:
    """Randomise the weights of a model, layer by layer from the last to the first, and attribute after each.

    If the attribution stays similar, it does not depend on what the model has learned. The similarity is
    Spearman's rank correlation of the magnitudes, 1 if nothing changed. The model is restored afterwards.

    Args:
        explain: The attribution method.
        model: The trained model. Layers are its modules with parameters and a ``reset_parameters`` method.
        images: Shape (batch, channels, height, width).
        target: A class for each image.
        seed: The seed of the weights; the global random state does not change.

    Raises:
        PolicyError: If the model has no such layer.

    Source: Adebayo, Gilmer, Muelly, Goodfellow, Hardt, Kim 2018, arXiv:1810.03292.
    """
    randomised = copy.deepcopy(model)
    layers = {
        name: module
        for name, module in randomised.named_modules()
        if callable(getattr(module, "reset_parameters", None)) and any(True for _ in module.parameters(False))
    }
    if not layers:
        raise PolicyError("check: the model has no layer whose weights could be drawn anew")
    trained = explain(model, images, target)
    found = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name in reversed(layers):
            layers[name].reset_parameters()
            attribution = explain(randomised, images, target)
            found.append(Randomised(name, attribution, _rank_correlation(trained, attribution)))
    return found


def _rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's correlation of the magnitudes, image by image."""
    pairs = zip(first.abs().flatten(1), second.abs().flatten(1), strict=True)
    return torch.stack([spearman_corrcoef(one, other).cpu() for one, other in pairs])


def random_order(images: Tensor, seed: int = 0) -> Tensor:
    """Return a random attribution, a baseline for others."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(images.shape, generator=generator, device="cpu").to(images)
