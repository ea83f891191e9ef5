"""Hypothesis strategies of wrong values in Python: for arguments of policies, masks and schedules."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import gradpolicy as gp
from fuzzing.running import REFUSED, Case
from gradpolicy.errors import known_arguments
from gradpolicy.masks import SOURCES

Arguments = Mapping[str, Any]
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 3, 2**40, 10**40, 0.5, -0.5, float("nan"), float("inf"), 1j),
    *("", "nosuch", "*", "!*", "0.*", "0.weight", "relu", "a" * 5000, "a\nb", b"x"),
    *([], [None], ["*"], [["*"]], (), {}, {"a": 1}, {"0.*": "a"}, {1: 2}, {"params": "*"}),
    *(object(), int, nn.Linear, lambda: 0, lambda *values: torch.zeros(7)),
)
POLICIES: dict[str, Arguments] = {
    "Stop": {"modules": "0"},
    "StraightThrough": {"ops": ["relu"]},
    "Guided": {},
    "Deconv": {},
    "Scale": {"factor": 0.5, "modules": "0"},
    "Reverse": {"factor": 0.5, "params": "0.weight"},
    "Clip": {"norm": 1.0, "params": "*"},
    "UseRule": {"rule": "hardtanh", "ops": ["relu"]},
    "Freeze": {"mask": gp.masks.Random(0.5)},
    "Rates": {"params": {"0.*": 0.1}},
    "LayerDecay": {"decay": 0.5},
    "When": {},
}
MASKS: dict[str, Arguments] = {
    **{name: {} for name in SOURCES},
    "Fixed": {"mask": ["*.bias"]},
    "Rows": {"rows": "0:2"},
    "Random": {"density": 0.5},
    "Phases": {"phases": [{"params": "2.*", "until": {"steps": 1}}, {"params": "*"}]},
    "TopK": {"density": 0.5, "by": "weight"},
    "PruneAndGrow": {"density": 0.5},
    "Function": {"function": lambda name, parameter, step: True},
}
RAMP = {"start": 1.0, "stop": 0.5, "steps": 5}
SCHEDULES: dict[str, Arguments] = {
    **dict.fromkeys(("Linear", "Cosine", "Cubic", "Exponential"), RAMP),
    "Ganin": {},
}


def train(made: Any) -> None:
    """Take two steps of a small model with what was made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    if isinstance(made, gp.masks.MaskSource):
        policy: Any = gp.Freeze(made)
    elif isinstance(made, gp.When):
        policy = gp.Stop(modules="0", when=made)
    elif isinstance(made, gp.LayerDecay):
        policy = gp.Rates({"*": made})
    else:
        policy = gp.Scale(made, modules="0") if isinstance(made, gp.schedules.Schedule) else made
    with gp.training(model, torch.optim.AdamW(model.parameters()), [policy], seed=0) as optimizer:
        for _ in range(2):
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a class, with an odd value for one or two of its arguments, or a misspelt one."""
    home, table = draw(st.sampled_from(((gp, POLICIES), (gp.masks, MASKS), (gp.schedules, SCHEDULES))))
    name = draw(st.sampled_from(sorted(table)))
    kind = getattr(home, name)
    names = [each for each in known_arguments(kind) if each not in ("rule", "parameters")]
    odd = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(ODD), min_size=1, max_size=2))
    misspelt = draw(st.sampled_from((False, False, False, True)))
    given = {**table[name], **({f"{names[0]}_": 1} if misspelt else odd)}
    text = ", ".join(f"{key}={value!r}"[:120] for key, value in given.items())
    return Case(f"{name}({text})", lambda: train(kind(**given)), REFUSED if misspelt else "")
