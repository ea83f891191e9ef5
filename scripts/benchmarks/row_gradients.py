"""Steps of a decoder of which a tenth of the rows train, against full training and against LoRA."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import Row, Step, one_thread, paired_ratio

WIDTH, LAYERS, TOKENS, BATCH, LENGTH = 512, 4, 65, 4, 128
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


def stepper(way: str, blocks: ExitStack) -> Step:
    """A training step: "full", of "rows", or of a "lora" adapter."""
    model: nn.Module = Decoder()
    tokens = torch.randint(0, TOKENS, (BATCH, LENGTH + 1))
    if way == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(LINEAR)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    if way == "rows":
        some = [f"*.{name}.weight" for name in LINEAR[:-1]] + ["head.weight"]
        rows = gp.Freeze(gp.masks.Random(0.1, level="row", every=None), params=some, frozen_state="drop")
        rest = gp.Freeze(gp.masks.Fixed(), params=["*", *(f"!{each}" for each in some)])
        optimizer = blocks.enter_context(gp.training(model, optimizer, [rows, rest], seed=0))

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def row_gradients() -> list[Row]:
    """Whole steps on all threads and on one."""
    rows: list[Row] = []
    with ExitStack() as blocks:
        steps = {way: stepper(way, blocks) for way in ("full", "rows", "lora")}
        for threads, most in ((torch.get_num_threads(), 0.78), (1, 0.72)):
            with one_thread() if threads == 1 else nullcontext():
                for own, other, target in (
                    ("rows", "full", most),
                    ("lora", "full", None),
                    ("rows", "lora", 0.95),
                ):
                    what = f"a step on {threads} thread{'s' * (threads > 1)}: {own} against {other}"
                    rows.append(paired_ratio(what, steps[own], steps[other], target=target))
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"row_gradients": row_gradients}
