"""Checks of attributions: pixels inserted and deleted, and weights drawn anew."""

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
"""An attribution of a model, images and classes, with all else bound."""


@dataclass(frozen=True)
class PixelCurves:
    """The probability of a class while pixels are inserted into a blurred image, or deleted from the image.

    Attributes:
        shares: Shares of the pixels that were changed, shape (steps + 1,).
        insertion: Probability after so many were inserted, shape (batch, steps + 1).
        deletion: Probability after so many were deleted, of the same shape.
    """

    shares: Tensor
    insertion: Tensor
    deletion: Tensor

    @property
    def insertion_area(self) -> Tensor:
        """The area below each insertion curve, shape (batch,), from 0 to 1. More is better."""
        return torch.trapezoid(self.insertion, self.shares)

    @property
    def deletion_area(self) -> Tensor:
        """The area below each deletion curve, shape (batch,), from 0 to 1. Less is better."""
        return torch.trapezoid(self.deletion, self.shares)


def insertion_deletion(
    forward: Forward, images: Tensor, attribution: Tensor, target: Target = None, *, steps: int = 20
) -> PixelCurves:
    """Insert and delete the pixels of images, those of the largest attribution first.

    The attribution of a pixel is the magnitude of the sum over its channels. A deleted pixel gets the value
    that it has in a blurred copy of the image. Inserted pixels come into that copy.

    Args:
        forward: Gives class logits of images.
        images: Shape (batch, channels, height, width).
        attribution: The same shape.
        target: A class for all images or one for each; the predicted ones unless given.
        steps: In how many steps all pixels are changed.

    Raises:
        PolicyError: If the shapes differ, or `steps` is no whole number above 0.

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
    # The place of each pixel in the order in which pixels are changed.
    ranks = strength.argsort(dim=1, descending=True).argsort(dim=1).view(-1, 1, *images.shape[-2:])
    shares = torch.linspace(0, 1, steps + 1)
    blurred, pixels = blur(images), images.shape[-2] * images.shape[-1]
    curves: dict[str, list[Tensor]] = {"insertion": [], "deletion": []}
    for share in shares:
        changed = ranks < torch.round(share * pixels).item()
        for name, new, old in (("insertion", images, blurred), ("deletion", blurred, images)):
            curves[name].append(predict(forward, torch.where(changed, new, old), classes)[1].cpu())
    return PixelCurves(shares, torch.stack(curves["insertion"], 1), torch.stack(curves["deletion"], 1))


class Randomised(NamedTuple):
    """An attribution after the weights of a layer, and of all layers after it, were drawn anew.

    Attributes:
        layer: The layer's name.
        attribution: Of the shape of the images.
        similarity: Its rank correlation with that of the trained model, from -1 to 1, shape (batch,).
    """

    layer: str
    attribution: Tensor
    similarity: Tensor


def randomisation_check(
    explain: Explain, model: nn.Module, images: Tensor, target: Tensor, *, seed: int = 0
) -> list[Randomised]:
    """Draw the weights of a model anew, layer by layer from the last, and attribute after each.

    An attribution that stays alike does not depend on what the model has learned. Similarity is Spearman's
    rank correlation of the magnitudes, 1 where nothing changed. The model is left as it was.

    Args:
        explain: The attribution.
        model: The trained model. Layers are its modules with parameters and a ``reset_parameters`` method.
        images: Shape (batch, channels, height, width).
        target: A class for each image.
        seed: Seeds the weights; the global random state is left alone.

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
    """Return an attribution at random, with which others are compared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(images.shape, generator=generator).to(images)
