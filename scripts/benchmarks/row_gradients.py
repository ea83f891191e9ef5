"""Steps of a decoder of which some rows or entries train, against full training and peft's adapters."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradpolicy as gp
from benchmarks.measure import Row, one_thread, time_row, wall_seconds
from gradpolicy.tensors.row_gradient import RowGradient

WIDTH, LAYERS, TOKENS, BATCH, LENGTH = 512, 4, 65, 4, 128
LINEAR = ("project", "output", "widen", "narrow", "head")
SHARE, ROUNDS, STEPS = 0.1, 7, 3
WAYS = ("full", "rows", "lora", "shira", "entries of shira", "supertuning", "entries of supertuning")
PAIRS = (
    ("rows", "full"),
    ("lora", "full"),
    ("rows", "lora"),
    ("entries of shira", "shira"),
    ("entries of supertuning", "supertuning"),
)


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each position."""
        query, key, value = (
            part.unflatten(-1, (8, -1)).transpose(1, 2)
            for part in self.project(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class Decoder(nn.Module):
    """A decoder of characters, 12.7 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next characters."""
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """One way to train the decoder.

    Args:
        way: One of `WAYS`.
        wrap: What is done with the model before its optimizer is wrapped.
    """

    def __init__(self, way: str, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        self.model: nn.Module = Decoder()
        self.tokens = torch.randint(0, TOKENS, (BATCH, LENGTH + 1))
        if way in ("lora", "shira", "supertuning"):
            self.model = _with_adapter(self.model, way)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Decay would pull an adapter to 0 and the weight itself elsewhere.
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0, fused=True)
        self.block: AbstractContextManager[Any] = nullcontext(optimizer)
        self.model = wrap(self.model)
        if way.startswith(("rows", "entries")):
            source: Any = gp.masks.Random(SHARE, level="row", every=None)
            if way != "rows":
                source = gp.masks.Fixed(_support(way.split()[-1]))
            some = [f"*.{name}.weight" for name in LINEAR[:-1]] + ["head.weight"]
            policies = {
                "some": gp.Freeze(source, params=some, frozen_state="drop"),
                "rest": gp.Freeze(gp.masks.Fixed(), params=["*", *(f"!{each}" for each in some)]),
            }
            self.block = gp.training(self.model, optimizer, policies, seed=0)
        self.optimizer: torch.optim.Optimizer = self.block.__enter__()
        self.losses: list[float] = []

    def backward(self) -> None:
        """Compute the gradients of a step."""
        loss = self.model(self.tokens)
        loss.backward()
        self.losses.append(float(loss.detach()))

    def step(self) -> None:
        """Make one update."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients of one backward pass."""
        self.backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        held = sum((each.held if isinstance(each, RowGradient) else each).nbytes for each in gradients)
        self.optimizer.zero_grad()
        return held

    def close(self) -> None:
        """Take the policies off."""
        self.block.__exit__(None, None, None)


def _with_adapter(model: nn.Module, way: str) -> nn.Module:
    import peft

    names = list(LINEAR)
    if way == "lora":
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=names))
    if way == "shira":
        return peft.get_peft_model(model, peft.ShiraConfig(r=8, random_seed=0, target_modules=names))
    return peft.get_peft_model(model, peft.SupertuningConfig(sparsity=0.99, target_modules=names))


@functools.cache
def _support(adapter: str) -> Mapping[str, Tensor]:
    """Return the masks of the entries that an adapter of peft trains."""
    masks: dict[str, Tensor] = {}
    for name, module in _with_adapter(Decoder(), adapter).named_modules():
        layer: Any = module
        if hasattr(layer, "base_layer"):
            mask = torch.zeros(layer.base_layer.weight.shape, dtype=torch.bool)
            if adapter == "shira":
                mask[tuple(layer.shira_indices["default"].long())] = True
            else:
                mask.view(-1)[layer.supertuning_indices["default"].long()] = True
            masks[name.removeprefix("base_model.model.") + ".weight"] = mask
    return masks


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def _peak(way: str, answer: "multiprocessing.Queue[int]") -> None:
    import peft  # noqa: F401  # so that it counts for none

    if way.startswith("entries"):
        _support(way.split()[-1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = _resident("VmRSS")
    training = Training(way)
    for _ in range(STEPS):
        training.step()
    answer.put(_resident("VmHWM") - before)
    training.close()


def peak_bytes(way: str) -> int:
    """Return how much memory a process of its own took for a model and three steps, at most."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_peak, args=(way, answer))
    process.start()
    result = answer.get()
    process.join()
    return result


class _Sent(TorchDispatchMode):
    """Counts the bytes that are given to collectives."""

    nbytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            self.nbytes += sum(each.nbytes for each in tree_leaves(args[0]) if isinstance(each, Tensor))
        return operator(*args, **(kwargs or {}))


@contextmanager
def _alone() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_bytes(way: str) -> int:
    """Return the bytes of a step's gradients that a rank of DistributedDataParallel sends."""
    training = Training(way, DistributedDataParallel)
    training.step()
    with _Sent() as sent:
        training.backward()
    training.close()
    return sent.nbytes


def _times(trainings: Mapping[str, Training]) -> dict[str, list[float]]:
    """Return the seconds of the steps of each way, in rounds of one step each."""
    taken: dict[str, list[float]] = {way: [] for way in trainings}
    for number in range(-1, ROUNDS):
        for way in list(trainings)[:: 1 if number % 2 else -1]:
            seconds = wall_seconds(trainings[way].step)
            if number >= 0:
                taken[way].append(seconds)
    return taken


def row_gradients() -> list[Row]:
    """Whole steps on all threads and on one, losses, gradients, what DDP sends, and the peak of memory."""
    trainings = {way: Training(way) for way in WAYS}
    others = {"rows": 0.95, "entries of shira": 1.0, "entries of supertuning": 1.0}
    rows: list[Row] = []
    for threads, most in ((torch.get_num_threads(), 0.78), (1, 0.72)):
        with one_thread() if threads == 1 else nullcontext():
            taken = _times(trainings)
        for own, other in PAIRS:
            target = most if (own, other) == ("rows", "full") else others.get(own)
            ratios = [mine / theirs for mine, theirs in zip(taken[own], taken[other], strict=True)]
            what = f"a step on {threads} thread{'s' * (threads > 1)}: {own} against {other}"
            fastest = min(taken[own]) / min(taken[other])
            rows.append({**time_row(what, ratios, taken[own], taken[other], target), "fastest": fastest})

    def compare(what: str, unit: str, values: Mapping[str, float], targets: Mapping[Any, float]) -> None:
        for own, other in PAIRS:
            if own in values and other in values:
                ratio, target = values[own] / values[other], targets.get((own, other))
                rows.append(
                    {"what": f"{what}: {own} against {other}", "ratio": ratio, "unit": unit, "target": target}
                )

    few = {("rows", "full"): 0.12}
    losses = {way: each.losses[-1] for way, each in trainings.items() if "shira" in way or "super" in way}
    compare("the last loss", "loss", losses, {})
    compare("gradients", "bytes", {way: each.gradient_bytes() for way, each in trainings.items()}, few)
    for training in trainings.values():
        training.close()
    with _alone():
        compare("sent by DDP", "bytes", {way: sent_bytes(way) for way in ("full", "rows")}, few)
    targets = {("rows", "lora"): 1.0} | dict.fromkeys(PAIRS[3:], 0.9)
    compare("peak of memory", "bytes", {way: peak_bytes(way) for way in WAYS}, targets)
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"row_gradients": row_gradients}
