"""Draws the pictures of the mask cards: each source at work on a small network that trains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradpolicy as gp
from drawing.common import panel
from gradpolicy.freezing import Freezer
from gradpolicy.masks.layers import find_layers
from gradpolicy.tensors.mask import as_tensor

FOLDER = Path(__file__).parents[2] / "docs" / "masks" / "pictures"
TRAINS = "Oranges"
WATCHED = "blocks.2.weight"


class Network(nn.Module):
    """An embedding, six blocks and a head, on sequences whose next token is a sum."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for what follows."""
        x = self.embed(tokens).sum(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@dataclass
class Course:
    """For each step the share of each layer that trains, and one weight's mask."""

    layers: list[str]
    shares: list[list[float]] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)


def train(source: gp.masks.MaskSource, steps: int = 60, epoch_of: int = 10) -> Course:
    """Trains the network under a source, and watches."""
    torch.manual_seed(0)
    model = Network()
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    freezer = Freezer(model, [optimizer], {"masks": gp.Freeze(source)}, seed=1)
    named = dict(model.named_parameters())
    layers = find_layers(named)
    course = Course([layer.name for layer in layers])
    for step in range(steps):
        epoch = step // epoch_of
        freezer.begin_step(step, epoch)
        course.shares.append([_share(optimizer, [named[n] for n in layer.parameters]) for layer in layers])
        if WATCHED in freezer.parameters:
            shape = named[WATCHED].shape
            course.masks.append(as_tensor(freezer.mask_of(WATCHED), shape).expand(shape).clone())
        tokens = torch.randint(16, (64, 3))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 16).backward()
        freezer.observe(optimizer)
        optimizer.step()
    return course


def by_layer(axes: Axes, course: Course, title: str, size: int = 8) -> None:
    """Draw the share of each layer that trains, by step."""
    panel(axes, title, "step (dark: trains)", baseline=False, size=size)
    axes.imshow(
        torch.tensor(course.shares).T, cmap=TRAINS, vmin=0, vmax=1, aspect="auto", interpolation="none"
    )
    axes.set_yticks(range(len(course.layers)), course.layers)


def entries(axes: Sequence[Axes], course: Course, steps: tuple[int, ...]) -> None:
    """Draw one weight's mask at some steps."""
    for each, step in zip(axes, steps, strict=True):
        panel(each, f"{WATCHED}, step {step}", "", baseline=False, size=8)
        each.imshow(course.masks[step], cmap=TRAINS, vmin=0, vmax=1, interpolation="none")
        each.set(xticks=[], yticks=[])


def layer_picture(course: Course, title: str) -> Figure:
    """Draw layers by steps."""
    figure = Figure(figsize=(5.0, 2.5), layout="constrained")
    by_layer(figure.subplots(), course, title)
    return figure


def entry_picture(course: Course, title: str, steps: tuple[int, ...] = (0, 20, 40)) -> Figure:
    """Draw one weight's mask at some steps."""
    figure = Figure(figsize=(7.4, 2.8), layout="constrained")
    figure.suptitle(title, fontsize=9)
    entries(figure.subplots(1, len(steps)), course, steps)
    return figure


def topk_picture(course: Course, title: str, steps: tuple[int, ...]) -> Figure:
    """Draw layers by steps, and beside them one weight's mask."""
    figure = Figure(figsize=(9.0, 2.5), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(steps), width_ratios=[2, *[1] * len(steps)])
    by_layer(first, course, title)
    entries(others, course, steps)
    return figure


def _share(optimizer: gp.MaskedOptimizer, parameters: list[nn.Parameter]) -> float:
    entries = sum(parameter.numel() for parameter in parameters)
    return sum(optimizer.active_share(parameter) * parameter.numel() for parameter in parameters) / entries


def _striped(name: str, parameter: Tensor, step: int) -> Tensor:
    rows = (torch.arange(len(parameter)) + step // 10) % 4 == 0
    return rows.reshape(-1, *[1] * (parameter.dim() - 1))


masks = gp.masks
PHASES: list[dict[str, object]] = [
    {"params": "head.*", "until": {"steps": 15}},
    {"params": ["head.*", "blocks.[345].*"], "until": {"steps": 20}},
    {"params": "*"},
]
PICTURES: dict[str, Callable[[], Figure]] = {
    "random": lambda: entry_picture(train(masks.Random(0.3, every=20)), "Random(0.3, every=20)"),
    "layerwise": lambda: layer_picture(
        train(masks.Layerwise(active=2, every=10)), "Layerwise(active=2, every=10)"
    ),
    "block_cyclic": lambda: layer_picture(
        train(masks.BlockCyclic("reverse", every=5)), 'BlockCyclic("reverse", every=5)'
    ),
    "gradual": lambda: layer_picture(train(masks.Gradual(), epoch_of=7), "Gradual(), epochs of 7 steps"),
    "phases": lambda: layer_picture(train(masks.Phases(PHASES)), "Phases: 15 steps, 20 steps, to the end"),
    "topk": lambda: topk_picture(
        train(masks.TopK(0.2, by="fisher", window=10, before="freeze", every=20)),
        'TopK(0.2, by="fisher", window=10, every=20)',
        (0, 10, 40),
    ),
    "prune_and_grow": lambda: entry_picture(
        train(masks.PruneAndGrow(0.2, every=10, stop=60, distribution="erk")),
        "PruneAndGrow(0.2, every=10, erk)",
        (0, 20, 50),
    ),
    "function": lambda: entry_picture(
        train(masks.Function(_striped)), "a function: every fourth row, moving"
    ),
}
