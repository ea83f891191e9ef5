"""Draws the README's picture from a short run on Fashion-MNIST in plain PyTorch."""

import os
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.insight.attribution import guided
from gradpolicy.insight.pictures import overlay
from gradpolicy.tasks import FashionMNISTDataModule
from gradpolicy.tasks.models import QuantizedConvNet

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DATA = Path(os.environ.get("FASHION_MNIST", "data/fashion_mnist"))
"""Where the images lie, or are downloaded to."""
FORWARD, BACKWARD, FROZEN = "#0072B2", "#D55E00", "#BBBBBB"
STEPS = 400
SHOWN = {"sneaker": 0, "bag": 0, "trouser": 0, "ankle boot": 0}
"""The garments that are shown: which test image of each class."""
WATCHED = 40


def train(images: Tensor, labels: Tensor) -> tuple[QuantizedConvNet, Tensor, Tensor]:
    """Trains the default network; gives it with the values and masks of some weights in the first steps."""
    model = QuantizedConvNet(size=28)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    freeze = gp.Freeze(gp.masks.Random(density=0.5, every=5), params="trunk.*", frozen_state="zero")
    freezer = Freezer(model, optimizer, {"random": freeze}, seed=1)
    weight = next(model.trunk.parameters())
    values, masks = [], []
    with gp.install(model, [gp.Stop(modules="probe"), gp.StraightThrough(ops=["round"])]):
        for step in range(STEPS):
            freezer.begin_step(step)
            chosen = torch.randint(0, len(images), (64,))
            prediction = model(images[chosen])
            losses = [torch.nn.functional.cross_entropy(logits, labels[chosen]) for logits in prediction]
            torch.stack(losses).sum().backward()
            freezer.observe()
            values.append(weight.detach().flatten().clone())
            masks.append(optimizer.get_mask(weight).expand(weight.shape).flatten().clone())
            optimizer.step()
            freezer.finish_step()
            optimizer.zero_grad()
    freezer.restore()
    return model, torch.stack(values[:WATCHED]), torch.stack(masks[:WATCHED])


def draw_rounding(axes: Axes) -> None:
    """The forward value of round, and the gradient that a policy gives it."""
    x = torch.linspace(-2.4, 2.4, 960, requires_grad=True)
    with gp.gradient_override({"round": "hardtanh"}):
        y = x.round()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    axes.plot(x.detach(), y.detach(), color=FORWARD, label="forward: round")
    axes.plot(x.detach(), gradient, color=BACKWARD, label="gradient: hardtanh")
    axes.set_title("another gradient", fontsize=10)
    axes.set_xlabel("x", fontsize=9)
    axes.legend(fontsize=8, loc="upper left")


def draw_freezing(axes: Axes, values: Tensor, masks: Tensor) -> None:
    """Weights over the steps, grey where they are frozen."""
    for index, entry in enumerate((3, 40, 77, 114, 151)):
        path = values[:, entry] - values[0, entry] + 0.05 * index
        for step in range(WATCHED - 1):
            colour = FORWARD if masks[step, entry] else FROZEN
            axes.plot([step, step + 1], path[step : step + 2], color=colour, linewidth=2)
    axes.set_title("a random half trains, Adam exact per entry", fontsize=10)
    axes.set_xlabel("step (blue trains, grey is frozen)", fontsize=9)
    axes.set_ylabel("weight (shifted)", fontsize=9)
    axes.set_yticks([])


def draw_guided(axes: Axes, model: QuantizedConvNet, data: FashionMNISTDataModule) -> None:
    """Some garments with their guided attribution below."""
    test_images, test_labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    classes = [data.classes.index(name) for name in SHOWN]
    images = torch.stack(
        [
            test_images[test_labels == number][place]
            for number, place in zip(classes, SHOWN.values(), strict=True)
        ]
    )
    with gp.install(model, [gp.StraightThrough(ops=["round"])]):
        attribution = guided(model, images, target=classes)
    axes.set_title("guided backpropagation: what speaks for the class", fontsize=10)
    axes.set_axis_off()
    for column, name in enumerate(SHOWN):
        garment, own = images[column], attribution[column]
        for row, pixels in enumerate((1 - garment[0].numpy(), overlay(1 - garment, own))):
            picture = axes.inset_axes((0.25 * column, 0.48 - 0.47 * row, 0.24, 0.45))
            picture.imshow(pixels, cmap="gray", vmin=0, vmax=1)
            picture.set_axis_off()
            if row == 0:
                picture.set_title(name, fontsize=9)


def overview() -> Figure:
    """Trains the default network on clothes, and shows what three policies did."""
    torch.manual_seed(0)
    data = FashionMNISTDataModule(DATA, batch_size=1000, download=True)
    data.prepare_data()
    data.setup()
    images, labels = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    model, values, masks = train(images, labels)
    canvas = Figure(figsize=(11.5, 3.1), layout="constrained")
    left, middle, right = canvas.subplots(1, 3, width_ratios=(1, 1, 1.35))
    draw_rounding(left)
    draw_freezing(middle, values, masks)
    draw_guided(right, model, data)
    return canvas


PICTURES = {"overview": overview}
