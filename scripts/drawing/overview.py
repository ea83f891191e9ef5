"""Draws the README's picture from a short run in plain PyTorch."""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

import gradpolicy as gp
from gradpolicy.insight.attribution import guided
from gradpolicy.tasks.models import QuantizedConvNet

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
FORWARD, BACKWARD, FROZEN = "#0072B2", "#D55E00", "#BBBBBB"
STEPS = 240
WATCHED = 40


def train(images: Tensor, labels: Tensor) -> tuple[QuantizedConvNet, Tensor, Tensor]:
    """Trains the default network; gives it with the values and masks of some weights in the first steps."""
    model = QuantizedConvNet()
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    freeze = gp.Freeze(gp.masks.Random(density=0.5, every=5), params="trunk.*", frozen_state="zero")
    freezer = gp.Freezer(model, optimizer, {"random": freeze}, seed=1)
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


def draw_guided(axes: Axes, model: QuantizedConvNet, images: Tensor) -> None:
    """Three digits with their guided attribution below."""
    with gp.install(model, [gp.StraightThrough(ops=["round"])]):
        attribution = guided(model, images)
    scale = attribution.abs().amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-12)
    rows = (("digit", images, "Greys", 0), ("speaks for it", attribution / scale, "RdBu_r", -1))
    axes.set_title("guided backpropagation", fontsize=10)
    axes.set_axis_off()
    for number, (title, pixels, colours, least) in enumerate(rows):
        row = axes.inset_axes((0.12, 0.52 - 0.5 * number, 0.88, 0.46))
        gap = torch.zeros(8, 1)
        row.imshow(
            torch.cat([part for image in pixels[:, 0] for part in (image, gap)], dim=1),
            cmap=colours,
            vmin=least,
            vmax=1,
        )
        row.set_xticks([])
        row.set_yticks([])
        row.set_ylabel(title, fontsize=9)


def overview() -> Figure:
    """Trains the default network on digits, and shows what three policies did."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    model, values, masks = train(images[:1400], labels[:1400])
    canvas = Figure(figsize=(11, 3.1), layout="constrained")
    left, middle, right = canvas.subplots(1, 3)
    draw_rounding(left)
    draw_freezing(middle, values, masks)
    draw_guided(right, model, images[1400:1404])
    return canvas


PICTURES = {"overview": overview}
