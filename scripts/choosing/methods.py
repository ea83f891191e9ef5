"""The methods: which policies, on which model, and the baselines that train something else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import gradpolicy as gp
from gradpolicy import masks

Policies = list[Any]


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        policies: Gives the policies for a model and the number of steps.
        prepare: Changes the model first, as an adapter does.
        trains: False for the null: the start as it is, or the most frequent class.
    """

    policies: Callable[[nn.Module, int], Policies] = lambda model, steps: []
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    trains: bool = True


HEADS = ("head", "classifier")


def linears(model: nn.Module) -> list[str]:
    """Return the names of the linear layers but for the head's."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in HEADS and "pooler" not in name
    ]


def _head(model: nn.Module) -> list[str]:
    """Return the parameters of a fresh head, which trains in every method; none where the head is trained."""
    return [name for name, _ in model.named_parameters() if name.startswith("classifier.")]


def _only(source: masks.MaskSource, model: nn.Module) -> Policies:
    """Freeze by a source within linear weights, and all else but a fresh head."""
    weights = [f"{name}.weight" for name in linears(model)]
    others = {name for name, _ in model.named_parameters()} - set(weights) - set(_head(model))
    return [
        gp.Freeze(source, params=weights, frozen_state="drop"),
        gp.Freeze(masks.Fixed(), params=sorted(others), frozen_state="drop"),
    ]


def _named(*patterns: str) -> Callable[[nn.Module, int], Policies]:
    """Train what patterns name, and a fresh head."""

    def policies(model: nn.Module, steps: int) -> Policies:
        return [gp.Freeze(masks.Fixed([*patterns, *_head(model)]), params="*", frozen_state="drop")]

    return policies


def _head_only(model: nn.Module, steps: int) -> Policies:
    return [gp.Freeze(masks.Fixed(_head(model) or ["head*"]), params="*", frozen_state="drop")]


def _lora(model: nn.Module) -> nn.Module:
    """Wrap the linear layers in LoRA of rank 8; the head goes on training if it is fresh."""
    from peft import LoraConfig, get_peft_model

    saved = ["classifier"] if _head(model) else None
    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=linears(model), modules_to_save=saved)
    )


def _phases(model: nn.Module, steps: int) -> Policies:
    """Train the head, then the upper half of the layers too, then all."""
    layers, head = (
        ("bert.encoder.layer", ["classifier.*", "bert.pooler.*"])
        if _head(model)
        else ("layers", ["head*", "norm*"])
    )
    count = len(model.get_submodule(layers))  # type: ignore[arg-type]
    upper = [f"{layers}.{index}.*" for index in range(count // 2, count)]
    phases: list[dict[str, Any]] = [
        {"params": head, "until": {"steps": steps // 8}},
        {"params": [*head, *upper], "until": {"steps": steps // 2}},
        {"params": "*"},
    ]
    return [gp.Freeze(masks.Phases(phases), params="*", frozen_state="drop")]


TUNING: Mapping[str, Method] = {
    "nothing": Method(trains=False),
    "full": Method(),
    "head only": Method(_head_only),
    "biases (BitFit)": Method(_named("*bias")),
    "rows, 10 %": Method(lambda model, steps: _only(masks.Random(0.1, level="row", every=None), model)),
    "random entries, 10 %": Method(lambda model, steps: _only(masks.Random(0.1, every=None), model)),
    "LIFT, 10 %": Method(lambda model, steps: _only(masks.TopK(0.1, by="lift"), model)),
    "phases": Method(_phases),
    "LoRA, r = 8": Method(prepare=_lora),
}

WEIGHTS = ["*conv*.weight", "*shortcut.weight"]


def _sparse(source: Callable[[int], masks.MaskSource]) -> Method:
    return Method(lambda model, steps: [gp.Freeze(source(steps), params=WEIGHTS, frozen_state="zero")])


SPARSE: Mapping[str, Method] = {
    "nothing": Method(trains=False),
    "dense": Method(),
    "random topology that stays, 90 %": _sparse(
        lambda steps: masks.PruneAndGrow(density=0.1, distribution="erk", grow="random", fraction=0.0)
    ),
    "RigL, 90 %": _sparse(
        lambda steps: masks.PruneAndGrow(
            density=0.1, distribution="erk", every=max(steps // 20, 1), stop=steps * 3 // 4
        )
    ),
    "Top-KAST, 90 %": Method(
        lambda model, steps: [
            gp.ForwardMask(masks.TopK(0.1, by="magnitude", within="tensor", every=1), params=WEIGHTS)
        ]
    ),
    "2:4": Method(
        lambda model, steps: [
            gp.ForwardMask(masks.TopK(by="magnitude", level="2:4", every=1), params=WEIGHTS)
        ]
    ),
}

METHODS = {"shakespeare": TUNING, "minilm": TUNING, "fashion": SPARSE}
