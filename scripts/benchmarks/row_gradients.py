"""Steps of a decoder of which a tenth of the rows train, against full training and against LoRA."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import Row, Step, one_thread, paired_ratio
from benchmarks.optimizers import apart, peak_bytes

WIDTH, LAYERS, TOKENS, BATCH, LENGTH = 512, 4, 65, 4, 128
WAYS = ("full", "rows", "rows in backward", "full in backward", "lora")
LINEAR = ("project", "output", "widen", "narrow", "head")


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


def stepper(way: str, blocks: ExitStack, length: int = LENGTH) -> Step:
    """A training step: "full", of "rows", or of a "lora" adapter; of rows or all also "in backward"."""
    model: nn.Module = Decoder()
    tokens = torch.randint(0, TOKENS, (BATCH, length + 1))
    if way == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(LINEAR)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    policies: list[gp.Freeze] = []
    if way.startswith("rows"):
        some = [f"*.{name}.weight" for name in LINEAR[:-1]] + ["head.weight"]
        rows = gp.Freeze(gp.masks.Random(0.1, level="row", every=None), params=some, frozen_state="drop")
        rest = gp.Freeze(gp.masks.Fixed(), params=["*", *(f"!{each}" for each in some)])
        policies = [rows, rest]
    if way not in ("full", "lora"):
        block = gp.training(model, optimizer, policies, seed=0, step_in_backward="in backward" in way)
        optimizer = blocks.enter_context(block)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def row_gradients() -> list[Row]:
    """Whole steps on all threads and on one."""
    rows: list[Row] = []
    with ExitStack() as blocks:
        steps = {way: stepper(way, blocks) for way in WAYS}
        for threads, most in ((torch.get_num_threads(), 0.78), (1, 0.72)):
            with one_thread() if threads == 1 else nullcontext():
                for own, other, target in (
                    ("rows", "full", most),
                    ("rows in backward", "full", None),
                    ("full in backward", "full", None),
                    ("lora", "full", None),
                    ("rows", "lora", 0.95),
                ):
                    what = f"a step on {threads} thread{'s' * (threads > 1)}: {own} against {other}"
                    rows.append(paired_ratio(what, steps[own], steps[other], target=target))
    return rows


def row_memory() -> list[Row]:
    """The peak of a step above weights and optimizer state, with few tokens, so that gradients count most."""
    full = apart(_peak, "full")
    ways = [way for way in WAYS if way != "full"]
    return [
        {"what": f"peak of a step: {way} against full", "ratio": apart(_peak, way) / full, "unit": "peak"}
        for way in ways
    ]


def _peak(way: str) -> int:
    with ExitStack() as blocks, one_thread():
        step = stepper(way, blocks, length=16)
        for _ in range(3):
            step()
        return peak_bytes(step)


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"row_gradients": row_gradients, "row_memory": row_memory}
