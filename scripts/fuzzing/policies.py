"""Mutations of policy files: nodes in YAML below a ``--config-dir``, or written on the command line."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from fuzzing.case import Case, Expectation, command
from fuzzing.dangers import FILES, NAMES, PYTHON, target
from fuzzing.words import GARBAGE, misspelt, scratched, written

ACCEPT, REFUSE, EITHER = Expectation.ACCEPT, Expectation.REFUSE, Expectation.EITHER
Node = dict[str, Any]

FILE = "mine/policy/fuzzed.yaml"
HEAD = "# @package policy\n"
# Beside the policy that is tried: without it nothing passes the rounding.
OTHERS = "straight_through"


def _freeze(mask: Any, **more: Any) -> Node:
    return {"_target_": "gradpolicy.Freeze", "params": "*", "mask": mask, **more}


def _mask(name: str, **more: Any) -> Node:
    return {"_target_": f"gradpolicy.masks.{name}", **more}


# Each is right for the model that a run has unless told otherwise.
NODES: tuple[Node, ...] = (
    {"_target_": "gradpolicy.Stop", "modules": "model.probe", "mode": "detach"},
    {"_target_": "gradpolicy.Stop", "modules": ["model.probe"], "mode": "zero", "when": {"phases": ["fit"]}},
    {"_target_": "gradpolicy.Guided", "when": {"phases": ["test"]}},
    {
        "_target_": "gradpolicy.Guided",
        "modules": "model.trunk.*",
        "when": {"_target_": "gradpolicy.When", "start": 3},
    },
    {"_target_": "gradpolicy.Deconv", "when": {"phases": ["test"], "every": 2}},
    {"_target_": "gradpolicy.Scale", "factor": 0.5, "modules": "model.probe"},
    {
        "_target_": "gradpolicy.Scale",
        "factor": {"_target_": "gradpolicy.masks.Cosine", "start": 1.0, "stop": 0.0, "steps": 9},
        "modules": "model.probe",
    },
    {"_target_": "gradpolicy.Reverse", "factor": 1.0, "modules": ["model.probe"]},
    {"_target_": "gradpolicy.Clip", "value": 0.1, "params": ["*.bias", "!model.probe.*"]},
    {"_target_": "gradpolicy.Clip", "norm": 1.0, "modules": "model.trunk.0", "per_sample": True},
    {
        "_target_": "gradpolicy.UseRule",
        "rule": "scale",
        "parameters": {"factor": 2.0},
        "modules": "model.probe",
    },
    {
        "_target_": "gradpolicy.UseRule",
        "rule": "hardtanh",
        "ops": ["relu"],
        "when": {"start": 2, "stop": 9, "unit": "epoch"},
    },
    _freeze(_mask("Random", density=0.5, every=5), frozen_state="zero", bias_correction="tensor"),
    _freeze(_mask("Fixed", mask=["*.bias"]), params=["model.*", "!model.probe.*"]),
    _freeze(_mask("Layerwise", active=2, every=20), frozen_state="zero", when={"start": 5}),
    _freeze(_mask("BlockCyclic", order="forward", size=1, every=20), frozen_state="drop"),
    _freeze(_mask("Gradual", initial=1, every=1, unit="epoch")),
    _freeze(_mask("TopK", density=0.1, by="weight", scope="global")),
    _freeze(_mask("Rows", rows="0:2", dim=0), params="*.weight"),
    _freeze(_mask("PruneAndGrow", density=0.2, grow="random"), params="model.trunk.*.weight"),
)
# What a key of a policy can be that is surely wrong.
WRONG: dict[str, tuple[Any, ...]] = {
    "_target_": (
        "gradpolicy.Stpo",
        "gradpolicy",
        "Stop",
        "torch.nn.Linear",
        "gradpolicy.masks.Random",
        3,
        None,
        "",
        ["a"],
        "gradpolicy..Stop",
    ),
    "modules": ("nosuch.*", 3, ["model.probe", 3], {"a": 1}, ["!*"], "torch.nn.Nothing"),
    "params": ("nosuch.*", 3, [], {"a": 1}, ["!*"], [None], ""),
    "ops": ("rond", ["relu", 3], {"a": 1}, "torch.nosuch", [None], "os.system"),
    "mode": ("detch", 3, None, ["detach"], {}),
    "frozen_state": ("kep", 3, None, ["keep"], True),
    "bias_correction": ("entri", 3, None, []),
    "factor": ("abc", None, [1.0], True, {"a": 1}, float("nan")),
    "value": ("abc", -1.0, 0, [1.0], True, float("nan")),
    "norm": ("abc", -1.0, 0, [1.0], True, float("nan")),
    "rule": ("nosuch", 3, None, ["scale"], {"a": 1}, *NAMES),
    "parameters": ("abc", 3, {"nosuch": 1}, [1]),
    "when": (
        "abc",
        3,
        [1],
        {"nosuch": 3},
        {"phases": ["nosuch"]},
        {"start": -1},
        {"every": 0},
        {"unit": "day"},
        {"start": 5, "stop": 5},
        {"start": 1.5},
        {"_target_": "gradpolicy.Stop"},
    ),
    "mask": (
        "abc",
        3,
        None,
        [1],
        {"a": 1},
        _mask("Nothing"),
        {"_target_": "gradpolicy.Stop", "modules": "model.probe"},
        {"_target_": "torch.nn.Linear"},
    ),
    "density": ("abc", -0.1, 1.5, None, [0.5], float("nan"), True),
    "every": (0, -1, 1.5, "often", [3], float("nan")),
    "order": ("nosuch", 3, []),
    "by": ("nosuch", 3, []),
    "scope": ("nosuch", 3, []),
    "grow": ("nosuch", 3, []),
    "active": (-1, 1.5, "abc", [2]),
    "per_sample": ("abc", 3, [True]),
}

# Files that are no policy, or that do more than describe one.
WRONG_FILES: dict[str, str] = {
    "no YAML": "a: [1\n",
    "a tab": "fuzzed:\n\t_target_: gradpolicy.Stop\n",
    "a list": "# @package policy\n- a\n- b\n",
    "a word": "# @package policy\nabc\n",
    "no UTF-8": "# @package policy\nfuzzed: {_target_: \udcff\udcfe}\n",
    "a null byte": "# @package policy\nfuzzed: {_target_: a\0b}\n",
    "a key twice": "# @package policy\nfuzzed: {_target_: gradpolicy.Guided, _target_: gradpolicy.Deconv}\n",
    "an unknown tag": "# @package policy\nfuzzed: !nothing {}\n",
    "a tag that runs code": "# @package policy\nfuzzed: !!python/object/apply:os.system ['touch canary']\n",
    "a tag that names code": "# @package policy\nfuzzed: !!python/name:os.system\n",
    "two documents": "# @package policy\nfuzzed: {}\n---\nfuzzed: {}\n",
    "deep nesting": f"# @package policy\nfuzzed: {'{a: ' * 150}1{'}' * 150}\n",
    "deeper nesting": f"# @package policy\nfuzzed: {'[' * 5000}{']' * 5000}\n",
    "many policies": "# @package policy\n"
    + "".join(f"p{number}: {{_target_: gradpolicy.Stop, modules: nosuch}}\n" for number in range(300)),
    "a missing default": "defaults: [nosuch]\nfuzzed: {}\n",
    "itself as a default": "defaults: [fuzzed]\n",
    "defaults of a wrong kind": "defaults: 3\n",
    "an anchor that holds itself": "# @package policy\nfuzzed: &a [*a]\n",
    "anchors of anchors": """\
# @package policy
fuzzed:
  a: &a [x, x, x, x, x, x, x, x]
  b: &b [*a, *a, *a, *a, *a, *a, *a, *a]
  c: &c [*b, *b, *b, *b, *b, *b, *b, *b]
  d: &d [*c, *c, *c, *c, *c, *c, *c, *c]
  e: &e [*d, *d, *d, *d, *d, *d, *d, *d]
""",
    "allows itself a package": """\
# @package _global_
allowed_targets: [stranger]
policy:
  fuzzed: {_target_: gradpolicy.UseRule, rule: stranger.rule, ops: [relu]}
""",
    "allows itself a target": """\
# @package _global_
allowed_targets: [os]
policy:
  fuzzed: {_target_: os.system, command: touch canary}
""",
    "another search path": "# @package _global_\nhydra: {searchpath: ['file://guarded']}\n",
    "a callback of Hydra's": "# @package _global_\nhydra: {callbacks: {evil: {_target_: stranger.rule}}}\n",
    "a log handler": """\
# @package _global_
hydra:
  job_logging: {handlers: {evil: {class: logging.FileHandler, filename: canary}}}
""",
    "a log formatter": """\
# @package _global_
hydra:
  job_logging: {formatters: {evil: {(): stranger.rule}}}
""",
}
ODD_FILES: dict[str, str] = {
    "nothing": "",
    "only a comment": "# nothing\n",
    "a wrong package": "# @package ..\nfuzzed: {_target_: gradpolicy.Guided}\n",
    "an anchor": "# @package policy\nfuzzed: &a {_target_: gradpolicy.Guided}\nb: {<<: *a, ops: nosuch}\n",
}


def right_file(draw: random.Random) -> Case:
    node = copy.deepcopy(draw.choice(NODES))
    return _case(draw, "a right policy", node, ACCEPT)


def other_order(draw: random.Random) -> Case:
    node = draw.choice(NODES)
    keys = draw.sample(list(node), len(node))
    return _case(draw, "keys in another order", {key: copy.deepcopy(node[key]) for key in keys}, ACCEPT)


def wrong_entry(draw: random.Random) -> Case:
    """A value that is surely wrong for its key."""
    node = copy.deepcopy(draw.choice(NODES))
    below, key = draw.choice([(below, key) for below, key in _places(node) if key in WRONG])
    below[key] = copy.deepcopy(draw.choice(WRONG[key]))
    return _case(draw, "a wrong entry", node, REFUSE, ("policy",))


def unknown_entry(draw: random.Random) -> Case:
    node = copy.deepcopy(draw.choice(NODES))
    below = draw.choice([below for below, _ in _places(node) if "_target_" in below])
    name = misspelt(draw, draw.choice([key for key in below if key != "_target_"] or ["every"]), _ARGUMENTS)
    below[name] = draw.choice((None, 3, "abc", []))
    return _case(draw, "an unknown entry", node, REFUSE, (name,))


def missing_entry(draw: random.Random) -> Case:
    node = copy.deepcopy(draw.choice(NODES))
    below, key = draw.choice(list(_places(node)))
    del below[key]
    return _case(draw, "a missing entry", node, REFUSE if below is node and key == "_target_" else EITHER)


def garbage(draw: random.Random) -> Case:
    """Anything at any place, once to three times."""
    node = copy.deepcopy(draw.choice(NODES))
    for _ in range(draw.randint(1, 3)):
        below, key = draw.choice(list(_places(node)))
        value = copy.deepcopy(draw.choice(GARBAGE))
        below[key] = draw.choice((value, value, [below[key], value], {key: below[key]}, [below[key]]))
    return _case(draw, "garbage in a policy", node, EITHER)


def swapped(draw: random.Random) -> Case:
    """Two values change places."""
    node = copy.deepcopy(draw.choice(NODES))
    (one, first), (two, second) = draw.sample(list(_places(node)), 2)
    if one is not two:
        one, two = node, node
        first, second = draw.sample(list(node), 2)
    one[first], two[second] = two[second], one[first]
    return _case(draw, "two values swapped", node, EITHER)


def hydras_entry(draw: random.Random) -> Case:
    """The keys by which Hydra itself is told something."""
    node = copy.deepcopy(draw.choice(NODES))
    key, value = draw.choice(
        (
            ("_partial_", "yes"),
            ("_partial_", True),
            ("_partial_", [1]),
            ("_recursive_", "no"),
            ("_recursive_", False),
            ("_convert_", "nonsense"),
            ("_convert_", 3),
            ("_args_", "abc"),
            ("_args_", [1, 2, 3, 4, 5, 6]),
            ("_args_", {"a": 1}),
            ("_nosuch_", 3),
        )
    )
    node[key] = value
    refused = value is not False
    return _case(draw, f"{key}", node, REFUSE if refused else EITHER)


def dangerous_node(draw: random.Random) -> Case:
    """A node that runs something, as the policy or anywhere within one."""
    name, evil = target(draw)
    node: Node = copy.deepcopy(draw.choice(NODES))
    below, key = draw.choice(list(_places(node)))
    if draw.random() < 0.4:
        node = evil
    elif draw.random() < 0.3:
        node["more"] = evil
    else:
        below[key] = name if key == "_target_" else evil
    return _case(draw, "a dangerous node", node, REFUSE, (name, "_target_"))


def dangerous_name(draw: random.Random) -> Case:
    """A module or function of a stranger's, for what is looked up by name."""
    name = draw.choice(NAMES)
    node: Node = draw.choice(
        (
            {"_target_": "gradpolicy.UseRule", "rule": name, "ops": ["round"]},
            {"_target_": "gradpolicy.StraightThrough", "surrogate": name, "ops": ["relu"]},
            {"_target_": "gradpolicy.Stop", "modules": name},
            {"_target_": "gradpolicy.Stop", "modules": ["model.probe", f"!{name}"]},
            {"_target_": "gradpolicy.Guided", "modules": [name]},
            {"_target_": "gradpolicy.Guided", "ops": [name]},
            _freeze(_mask("Fixed", mask=name)),
            _freeze(_mask("Random", density=0.5), params=name),
            _freeze(name),
            _freeze(_mask("TopK", density=0.1, by=name)),
        )
    )
    return _case(draw, "a stranger's name", node, REFUSE, ("policy",))


def allowed(draw: random.Random) -> Case:
    """The same name is right where the command line allows it."""
    node = {"_target_": "gradpolicy.UseRule", "rule": "stranger.rule", "ops": ["relu"]}
    case = _case(draw, "what was allowed", node, ACCEPT, more=("allowed_targets=[stranger]",))
    # This stranger is a friend: importing it leaves no trace.
    friend = FILES["stranger.py"].replace(PYTHON.encode(), b"")
    return Case(
        case.mutation, case.arguments, ACCEPT, files={**case.files, "stranger.py": friend}, holds=case.holds
    )


def odd_file(draw: random.Random) -> Case:
    """A file that is no policy, or more than one."""
    files = {**WRONG_FILES, **ODD_FILES}
    mutation = draw.choice(sorted(files))
    content = files[mutation].encode(errors="surrogateescape")
    expectation = REFUSE if mutation in WRONG_FILES else EITHER
    return Case(f"file: {mutation}", _chosen(), expectation, files={**FILES, FILE: content})


def scratched_file(draw: random.Random) -> Case:
    text = HEAD + yaml.safe_dump({"fuzzed": draw.choice(NODES)}, sort_keys=False)
    content = scratched(draw, text).encode(errors="surrogateescape")
    return Case("a scratched file", _chosen(), files={**FILES, FILE: content})


MUTATIONS: tuple[Callable[[random.Random], Case], ...] = (
    *(right_file,) * 2,
    other_order,
    *(wrong_entry,) * 4,
    *(unknown_entry,) * 2,
    missing_entry,
    *(garbage,) * 4,
    swapped,
    hydras_entry,
    *(dangerous_node,) * 3,
    *(dangerous_name,) * 2,
    allowed,
    *(odd_file,) * 3,
    *(scratched_file,) * 3,
)


def mutate(draw: random.Random) -> Case:
    """A policy with something done to it."""
    return draw.choice(MUTATIONS)(draw)


_ARGUMENTS = {key for node in (*NODES, WRONG) for key in node} | {
    "argument",
    "output",
    "inside",
    "calls",
    "at",
    "seed",
}


def _case(
    draw: random.Random,
    mutation: str,
    node: Node,
    expectation: Expectation,
    names: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Case:
    """The node in a file or on the command line."""
    # Where a value is a reference, what it comes to is another matter.
    holds = {"policy.fuzzed": node} if "${" not in repr(node) else {}
    if draw.random() < 0.5 or not _writable(node):
        text = HEAD + yaml.safe_dump({"fuzzed": node}, sort_keys=False, allow_unicode=True)
        tells = ("--cfg", "job") if draw.random() < 0.1 and expectation is ACCEPT else ()
        return Case(
            mutation, (*_chosen(*more), *tells), expectation, names, {**FILES, FILE: text.encode()}, holds
        )
    line = f"+policy.fuzzed={written(node)}"
    return Case(mutation, command(f"policy={OTHERS}", *more, line), expectation, names, FILES, holds)


def _chosen(*more: str) -> tuple[str, ...]:
    return ("--config-dir", "mine", *command(f"policy=[{OTHERS},fuzzed]", *more))


def _places(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of a tree of mappings, with the mapping that holds it."""
    for key, value in list(node.items()):
        yield node, key
        if isinstance(value, dict):
            yield from _places(value)


def _writable(node: Any) -> bool:
    """Whether Hydra's grammar has a way to write it: it knows no empty keys."""
    if isinstance(node, dict):
        return all(key != "" and _writable(value) for key, value in node.items())
    return all(map(_writable, node)) if isinstance(node, list) else True
