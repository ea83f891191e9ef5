"""Attribution maps under policies: gradients of a class score with respect to the images.

Policies act on every spelling of an operation, such as ``F.relu`` and ``nn.ReLU``. Methods that only need the
gradient of a model, such as captum's ``NoiseTunnel`` and ``IntegratedGradients``, work within a block of
:func:`gradpolicy.install`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.flow import install
from gradpolicy.policies import Deconv, FlowPolicy, Guided

Target = int | Sequence[int] | Tensor | None


def gradient(
    model: nn.Module, images: Tensor, target: Target = None, *, policies: Sequence[FlowPolicy] = ()
) -> Tensor:
    """Attribute by the plain gradient, ``∂ score(target) / ∂ images``, in evaluation mode.

    The weights, ``.grad`` and the training mode of the model do not change.

    Args:
        model: A model that returns class logits of images, as a tensor or as `logits` of a mapping or an
            object.
        images: Floating-point images of shape (batch, …).
        target: A class for all images or one for each; default: the predicted ones.
        policies: Flow policies to use, such as straight-through for a quantised model.

    Returns:
        The attribution, of the shape and dtype of the images.

    Raises:
        PolicyError: If the images are not floating point, or no gradient reaches them.

    Source: Simonyan, Vedaldi, Zisserman 2014, arXiv:1312.6034.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 3, bias=False)
        >>> attribution = gradient(model, torch.ones(1, 2), target=2)
        >>> torch.equal(attribution[0], model.weight[2].detach())
        True
    """
    if not images.is_floating_point():
        raise PolicyError(f"images: {images.dtype} given, floating point needed")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with install(model, list(policies)), torch.inference_mode(False), torch.enable_grad():
            inputs = images.clone().detach().requires_grad_()
            logits = class_logits(model(inputs))
            classes = logits.argmax(-1) if target is None else torch.as_tensor(target, device=logits.device)
            scores = logits.gather(-1, classes.long().expand(len(logits))[:, None])
            reaches = scores.requires_grad
            found = torch.autograd.grad(scores.sum(), inputs, allow_unused=True)[0] if reaches else None
    finally:
        for module, mode in modes:
            module.training = mode
    if found is None:
        raise PolicyError("attribution: no gradient reaches the images, something between cuts the graph")
    if not found.any():
        warn_user(
            "the attribution is zero everywhere: an operation without a gradient, such as round, is"
            " between; add a straight-through policy"
        )
    return found


def guided(
    model: nn.Module, images: Tensor, target: Target = None, *, policies: Sequence[FlowPolicy] = ()
) -> Tensor:
    """Attribute by guided backpropagation: ReLUs pass only positive gradients of active units.

    Arguments, result and errors are those of :func:`gradient`.

    Source: Springenberg, Dosovitskiy, Brox, Riedmiller 2015, arXiv:1412.6806.
    """
    return gradient(model, images, target, policies=[*policies, Guided()])


def deconv(
    model: nn.Module, images: Tensor, target: Target = None, *, policies: Sequence[FlowPolicy] = ()
) -> Tensor:
    """Attribute by a deconvolution network: ReLUs pass positive gradients, whatever their input.

    Arguments, result and errors are those of :func:`gradient`.

    Source: Zeiler, Fergus 2014, arXiv:1311.2901.
    """
    return gradient(model, images, target, policies=[*policies, Deconv()])


def class_logits(output: Any) -> Tensor:
    """Return the class logits in the output of a model.

    Args:
        output: A tensor; or a mapping or an object with `logits`.

    Raises:
        PolicyError: If it has no logits.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise PolicyError(
            f"model: gave {type(output).__name__}; expected a tensor or an object with 'logits'"
        )
    return logits
