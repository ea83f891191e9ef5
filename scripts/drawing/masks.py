"""Draws the pictures of the mask cards: each source at work on a small network that trains."""

from collections.abc import Callable
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
TRAINS, LINE = "Oranges", "#D55E00"
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

    @property
    def total(self) -> list[float]:
        """The share of all layers that trains, each layer counted alike."""
        return [sum(step) / len(step) for step in self.shares]


def train(
    source: gp.masks.MaskSource,
    steps: int = 60,
    epoch_of: int = 10,
    params: str = "*",
    pruned: float = 0.0,
) -> Course:
    """Trains the network, of which a share of each matrix is 0, under a source, and watches."""
    torch.manual_seed(0)
    model = Network()
    for parameter in model.parameters() if pruned else ():
        if parameter.dim() > 1:
            parameter.data *= torch.rand(parameter.shape) >= pruned
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    freezer = Freezer(model, [optimizer], {"masks": gp.Freeze(source, params=params)}, seed=1)
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


def by_layer(axes: Axes, course: Course, title: str) -> None:
    """Draw the share of each layer that trains, by step."""
    panel(axes, title, "step (dark: trains)", baseline=False, size=8)
    axes.imshow(
        torch.tensor(course.shares).T, cmap=TRAINS, vmin=0, vmax=1, aspect="auto", interpolation="none"
    )
    axes.set_yticks(range(len(course.layers)), course.layers)


def over_time(axes: Axes, course: Course) -> None:
    """Draw the share of the network that trains."""
    panel(axes, "share of the layers' entries that trains", "step", baseline=False, size=8)
    axes.plot(course.total, color=LINE, drawstyle="steps-post")
    axes.set_ylim(-0.03, 1.03)


def entries(figure: Figure, course: Course, steps: tuple[int, ...]) -> None:
    """One weight's mask at some steps."""
    for place, step in enumerate(steps):
        axes = figure.add_axes((0.46 + 0.18 * place, 0.2, 0.16, 0.62))
        panel(axes, f"{WATCHED}\nstep {step}", "", baseline=False, size=8)
        axes.imshow(course.masks[step], cmap=TRAINS, vmin=0, vmax=1, interpolation="none")
        axes.set_xticks([])
        axes.set_yticks([])


def layer_picture(course: Course, title: str) -> Figure:
    """Layers by step, and beside it the share that trains."""
    figure = Figure(figsize=(7.4, 2.5), layout="constrained")
    first, second = figure.subplots(1, 2)
    by_layer(first, course, title)
    over_time(second, course)
    return figure


def entry_picture(course: Course, title: str, steps: tuple[int, ...] = (0, 20, 40)) -> Figure:
    """Layers by step, and beside it one weight's mask."""
    figure = Figure(figsize=(7.4, 2.5))
    by_layer(figure.add_axes((0.09, 0.2, 0.32, 0.62)), course, title)
    entries(figure, course, steps)
    return figure


def _share(optimizer: gp.MaskedOptimizer, parameters: list[nn.Parameter]) -> float:
    entries = sum(parameter.numel() for parameter in parameters)
    return sum(optimizer.active_share(parameter) * parameter.numel() for parameter in parameters) / entries


def _striped(name: str, parameter: Tensor, step: int) -> Tensor:
    rows = (torch.arange(len(parameter)) + step // 10) % 4 == 0
    return rows.reshape(-1, *[1] * (parameter.dim() - 1))


masks = gp.masks
_PHASES: list[dict[str, object]] = [
    {"params": "head.*", "until": {"steps": 15}},
    {"params": ["head.*", "blocks.[345].*"], "until": {"steps": 20}},
    {"params": "*"},
]
PICTURES: dict[str, Callable[[], Figure]] = {
    "fixed": lambda: layer_picture(train(masks.Fixed(["*.bias", "head.*"])), 'Fixed(["*.bias", "head.*"])'),
    "rows": lambda: entry_picture(train(masks.Rows([0, 3], size=4)), "Rows([0, 3], size=4)"),
    "random": lambda: entry_picture(train(masks.Random(0.3, every=20)), "Random(0.3, every=20)"),
    "layerwise": lambda: layer_picture(
        train(masks.Layerwise(active=2, every=10)), "Layerwise(active=2, every=10)"
    ),
    "block_cyclic": lambda: layer_picture(
        train(masks.BlockCyclic("reverse", every=5)), 'BlockCyclic("reverse", every=5)'
    ),
    "gradual": lambda: layer_picture(train(masks.Gradual(), epoch_of=7), "Gradual(), epochs of 7 steps"),
    "phases": lambda: layer_picture(train(masks.Phases(_PHASES)), "Phases: 15 steps, 20 steps, to the end"),
    "topk": lambda: entry_picture(
        train(masks.TopK(0.2, by="fisher", window=10, before="freeze", every=20)),
        'TopK(0.2, by="fisher", window=10, every=20)',
        (0, 10, 40),
    ),
    "prune_and_grow": lambda: entry_picture(
        train(masks.PruneAndGrow(0.2, every=10, stop=60, distribution="erk")),
        "PruneAndGrow(0.2, every=10, erk)",
        (0, 20, 50),
    ),
    "zeros": lambda: entry_picture(
        train(masks.Zeros(), pruned=0.8), "Zeros(), of weights pruned to 20%", (0, 20, 50)
    ),
    "function": lambda: entry_picture(
        train(masks.Function(_striped)), "a function: every fourth row, moving"
    ),
}
