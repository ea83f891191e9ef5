"""A schedule of phases for a model, as a policy in YAML to edit."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from gradpolicy.checks import check_free
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layers import find_layers
from gradpolicy.where import named_parameters

HEADER = """\
# What trains in each phase, from the last layer to all of them: train with policy={name} from conf/policy.
# A phase ends after steps, epochs, or when a metric stops improving:
#   until: {{metric: val/loss, patience: 3, min_delta: 0.0, mode: min}}
# It may put its best weights back (best: true), and have settings of the optimizer (lr: 1.0e-4).
{name}:
  _target_: gradpolicy.Freeze
  params: "*"
  mask:
    _target_: gradpolicy.masks.Phases
    phases:
"""


def write_schedule(model: nn.Module, file: Path) -> None:
    """Write a policy by which one layer after the other joins the training, from the last to the first.

    Args:
        model: The model.
        file: Where it is written; the policy is named after it.

    Raises:
        PolicyError: If the file is there already.
    """
    check_free("--write-schedule", file, None, lambda path: False)
    parameters = named_parameters(model)
    layers = [_globs(layer, list(parameters)) for layer in find_layers(parameters)]
    lines = []
    for place in reversed(range(len(layers))):
        # Quoted as JSON, which is YAML too.
        training = json.dumps([glob for layer in reversed(layers[place:]) for glob in layer])
        lines += [f"      - params: {training}", *(["        until: {epochs: 1}"] if place else [])]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(HEADER.format(name=file.stem) + "\n".join(lines) + "\n", "utf-8")


def _globs(layer: Layer, names: list[str]) -> list[str]:
    """Return the globs of a layer: its own, or its modules', or names where those match other layers too."""
    found: dict[str, None] = {}
    for name in layer.parameters:
        wider = [module for module in (layer.name, name.rpartition(".")[0]) if module]
        matched = {f"{module}.*": {n for n in names if fnmatchcase(n, f"{module}.*")} for module in wider}
        fitting = [glob for glob, own in matched.items() if name in own and own <= set(layer.parameters)]
        found[fitting[0] if fitting else name] = None
    return list(found)
