"""Attributions: gradients of a class score with respect to the images.

Every method is a function of a model, images and target classes that returns a tensor of the images' shape.
The weights, ``.grad``, ``requires_grad`` and the training mode of the model do not change.

Methods that modify gradients use flow policies, which act on every spelling of an operation, such as
``F.relu`` and ``nn.ReLU``.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_number, check_whole
from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow import install
from gradpolicy.logits import class_logits
from gradpolicy.policies import Deconv, FlowPolicy, Guided

Forward = Callable[[Tensor], Any]
Target = int | Sequence[int] | Tensor | None
Attribution = Callable[..., Tensor]


def gradient(
    model: nn.Module, images: Tensor, target: Target = None, *, policies: Sequence[FlowPolicy] = ()
) -> Tensor:
    """Attribute by the plain gradient, ``∂ score(target) / ∂ images``.

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
    with _evaluating(model, policies):
        return input_gradient(model, images, target)


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


def smoothgrad(
    model: nn.Module,
    images: Tensor,
    target: Target = None,
    *,
    policies: Sequence[FlowPolicy] = (),
    samples: int = 25,
    noise: float = 0.15,
    seed: int = 0,
) -> Tensor:
    """Attribute by the mean gradient over noisy copies of the images.

    ``mean_k ∂ score(image + σ ε_k) / ∂ image`` with standard normal ε and ``σ = noise · (max − min)`` of each
    image. Other arguments, result and errors are those of :func:`gradient`.

    Args:
        model: See :func:`gradient`.
        images: See :func:`gradient`.
        target: See :func:`gradient`; the predicted classes are those of the images without noise.
        policies: See :func:`gradient`.
        samples: Number of noisy copies.
        noise: Standard deviation as a share of each image's range.
        seed: The seed of the noise; the global random state does not change.

    Source: Smilkov, Thorat, Kim, Viégas, Wattenberg 2017, arXiv:1706.03825.
    """
    check_whole("smoothgrad.samples", samples, least=1)
    check_number("smoothgrad.noise", noise)
    generator = torch.Generator("cpu").manual_seed(seed)
    pixels = images.flatten(1)
    spread = (noise * (pixels.amax(1) - pixels.amin(1))).view(-1, *[1] * (images.dim() - 1))
    with _evaluating(model, policies):
        target, _ = predict(model, images, target)
        total = torch.zeros_like(images)
        for _ in range(samples):
            epsilon = torch.randn(images.shape, generator=generator, dtype=images.dtype, device="cpu")
            total += input_gradient(model, images + spread * epsilon.to(images.device), target)
    return total / samples


def guided_gradcam(
    model: nn.Module,
    images: Tensor,
    target: Target = None,
    *,
    policies: Sequence[FlowPolicy] = (),
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Attribute by guided backpropagation times the class activation map (guided Grad-CAM).

    ``guided · upsample(relu(Σ_c mean(∂ score / ∂ A_c) · A_c))`` with the channels A_c of a convolution's
    output, upsampled bilinearly. Other arguments, result and errors are those of :func:`gradient`.

    Args:
        model: See :func:`gradient`.
        images: Shape (batch, channels, height, width).
        target: See :func:`gradient`.
        policies: See :func:`gradient`.
        layer: The convolution, or its name; default: the last one.

    Source: Selvaraju, Cogswell, Das, Vedantam, Parikh, Batra 2017, arXiv:1610.02391.
    """
    if not isinstance(layer, nn.Module):
        layer = model.get_submodule(find_convolution(model, layer))
    with _evaluating(model, policies):
        target, _ = predict(model, images, target)
        activation_map = _activation_map(model, layer, images, target)
    upsampled = functional.interpolate(
        activation_map, size=images.shape[-2:], mode="bilinear", align_corners=False
    )
    return guided(model, images, target, policies=policies) * upsampled


def integrated(
    model: nn.Module,
    images: Tensor,
    target: Target = None,
    *,
    policies: Sequence[FlowPolicy] = (),
    steps: int = 16,
) -> Tensor:
    """Attribute by the mean gradient on the way from a blurred copy to the image, times their difference.

    ``(image - blurred) · mean_k ∂ score / ∂ x`` at ``x = blurred + (k + 1/2) / steps · (image - blurred)``.
    Its sum is the difference of the scores. Under :class:`~gradpolicy.Guided` the gradients are guided.
    Other arguments, result and errors are those of :func:`gradient`.

    Args:
        model: See :func:`gradient`.
        images: Shape (batch, channels, height, width).
        target: See :func:`gradient`; the predicted classes are those of the images themselves.
        policies: See :func:`gradient`.
        steps: The number of points at which the gradient is computed.

    Source: Sundararajan, Taly, Yan 2017, arXiv:1703.01365.
    """
    with _evaluating(model, policies):
        return integrated_gradient(model, images, target, steps=steps)


METHODS: dict[str, Attribution] = {
    "gradient": gradient,
    "guided": guided,
    "deconv": deconv,
    "smoothgrad": smoothgrad,
    "guided_gradcam": guided_gradcam,
    "integrated": integrated,
}


def get_method(name: str) -> Attribution:
    """Return an attribution method by name.

    Raises:
        PolicyError: If there is no such method; names the nearest ones.
    """
    if name not in METHODS:
        raise unknown("attribution method", name, METHODS, key="method")
    return METHODS[name]


def predict(forward: Forward, images: Tensor, target: Target = None) -> tuple[Tensor, Tensor]:
    """Return a class for each image, by default the predicted one, and its probability.

    Returns:
        Two tensors of shape (batch,): int64 and floating point.
    """
    with torch.inference_mode(False), torch.no_grad():
        logits = _class_logits(forward, images.clone())
        classes = _as_classes(target, logits)
        return classes, logits.softmax(dim=-1).gather(-1, classes[:, None])[:, 0]


def input_gradient(forward: Forward, images: Tensor, target: Target = None) -> Tensor:
    """Return the gradient of class scores with respect to images, under the installed policies.

    It also works within `torch.inference_mode`, and does not change ``.grad``.

    Args:
        forward: A function that returns class logits of images. Images of a batch must not affect each other.
        images: Floating point, shape (batch, …).
        target: A class for all images or one for each; default: the predicted ones.

    Raises:
        PolicyError: If the images are not floating point, or no gradient reaches them.
    """
    if not images.is_floating_point():
        raise PolicyError(f"images: {images.dtype} given, floating point needed")
    found = _gradient(forward, images, target)
    if found is None:
        raise PolicyError("attribution: no gradient reaches the images, something between cuts the graph")
    if not found.any():
        warnings.warn(
            "the attribution is zero everywhere: an operation without a gradient, such as round, lies"
            " between; let a straight-through policy hold in this phase",
            stacklevel=2,
        )
    return found


def integrated_gradient(
    forward: Forward, images: Tensor, target: Target = None, *, steps: int = 16
) -> Tensor:
    """Return the attribution of :func:`integrated`, under the installed policies.

    Raises:
        PolicyError: If `steps` is not an integer above 0, the images do not have four dimensions or are not
            floating point, or no gradient reaches them.
    """
    check_whole("integrated.steps", steps, least=1)
    if images.dim() != 4:
        raise PolicyError(f"images: shape {tuple(images.shape)}; (batch, channels, height, width) needed")
    (classes, _), blurred = predict(forward, images, target), blur(images)
    places = [(index + 0.5) / steps for index in range(steps)]
    gradients = (input_gradient(forward, torch.lerp(blurred, images, place), classes) for place in places)
    return (images - blurred) * torch.stack(list(gradients)).mean(dim=0)


def blur(images: Tensor) -> Tensor:
    """Blur images by a Gaussian with a standard deviation of an eighth of their smaller side."""
    deviation = min(images.shape[-2:]) / 8
    reach = min(int(3 * deviation + 0.5), *(size - 1 for size in images.shape[-2:]))
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-(offsets**2) / (2 * deviation**2))
    kernel = (weights / weights.sum()).expand(images.shape[1], 1, 1, -1)
    for dimensions, padding in ((kernel, (reach, reach, 0, 0)), (kernel.mT, (0, 0, reach, reach))):
        padded = functional.pad(images, padding, mode="reflect")
        images = functional.conv2d(padded, dimensions, groups=images.shape[1])
    return images


def _gradient(
    forward: Forward, images: Tensor, target: Target, at: Callable[[Tensor], Tensor] = lambda images: images
) -> Tensor | None:
    """Return the gradient of class scores with respect to images, or to a tensor within the model."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = images.clone().detach().requires_grad_()
        logits = _class_logits(forward, inputs)
        scores = logits.gather(-1, _as_classes(target, logits)[:, None])
        if not scores.requires_grad:
            return None
        return torch.autograd.grad(scores.sum(), at(inputs), allow_unused=True)[0]


def _class_logits(forward: Forward, images: Tensor) -> Tensor:
    """Return the logits, one for each image and class."""
    logits = class_logits(forward(images))
    if logits.dim() != 2 or len(logits) != len(images):
        raise PolicyError(
            f"model: gives logits of the shape {tuple(logits.shape)} for {len(images)} images; one is needed "
            "for each image and class"
        )
    return logits


def _as_classes(target: Target, logits: Tensor) -> Tensor:
    if target is None:
        return logits.argmax(dim=-1)
    classes = torch.as_tensor(target, device=logits.device).long().expand(len(logits))
    count = logits.shape[-1]
    if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < count:
        raise PolicyError(f"target: the model has classes 0 to {count - 1}, {target} given")
    return classes


def find_convolution(model: nn.Module, layer: str | None = None) -> str:
    """Return the name of the layer for Grad-CAM: the given one, or the last `nn.Conv2d`.

    Raises:
        PolicyError: If there is no such module, or there are no convolutions.
    """
    modules = dict(model.named_modules())
    if layer is None:
        convolutions = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
        if not convolutions:
            raise PolicyError("guided_gradcam: the model has no nn.Conv2d; name a layer that gives channels")
        return convolutions[-1]
    if layer not in modules:
        raise unknown("module", layer, modules, key="layer")
    return layer


def _activation_map(model: nn.Module, layer: nn.Module, images: Tensor, target: Target) -> Tensor:
    """Return Grad-CAM of a layer, shape (batch, 1, height, width) of the layer's output."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        return output.clone()  # later operations may work in place

    handle = layer.register_forward_hook(keep)
    try:
        slope = _gradient(model, images, target, at=lambda images: outputs[-1])
    finally:
        handle.remove()
    if slope is None:
        raise PolicyError("attribution: no gradient reaches the layer, something between cuts the graph")
    weights = slope.mean(dim=(-2, -1), keepdim=True)
    return (weights * outputs[-1].detach()).sum(dim=1, keepdim=True).relu()


@contextmanager
def _evaluating(model: nn.Module, policies: Sequence[FlowPolicy]) -> Iterator[None]:
    """Set a model to evaluation mode under policies, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with install(model, list(policies)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
