"""Hypothesis strategies of policies: in YAML in a ``--config-dir``, or on the command line."""

import copy
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzzing.case import ACCEPT, EITHER, REFUSE, Case, Expectation, command
from fuzzing.commands import EXAMPLES
from fuzzing.dangers import FILES, NAMES, PYTHON, dangerous_nodes
from fuzzing.values import ODD, misspelt, scratched, written

Node = dict[str, Any]
FILE = "mine/policy/fuzzed.yaml"
HEAD = "# @package policy\n"
# Used with the policy under test, since otherwise no gradient passes the rounding.
CHOSEN = ("--config-dir", "mine", *command("policy=[straight_through,fuzzed]"))
WRONG: dict[str, list[Any]] = EXAMPLES["wrong"]
RIGHT: SearchStrategy[Node] = st.sampled_from(EXAMPLES["policies"]).map(copy.deepcopy)
# Hydra's own keys.
HYDRAS: tuple[tuple[str, Any], ...] = (
    *(("_partial_", value) for value in ("yes", True, [1])),
    *(("_recursive_", "no"), ("_convert_", "nonsense"), ("_convert_", 3), ("_nosuch_", 3)),
    *(("_args_", value) for value in ("abc", [1, 2, 3, 4, 5, 6], {"a": 1})),
)
WRONG_FILES: dict[str, str] = {
    **EXAMPLES["wrong_files"],
    "no UTF-8": f"{HEAD}fuzzed: {{_target_: \udcff\udcfe}}\n",
    "a null byte": f"{HEAD}fuzzed: {{_target_: a\0b}}\n",
    "deep nesting": f"{HEAD}fuzzed: {'{a: ' * 150}1{'}' * 150}\n",
    "deeper nesting": f"{HEAD}fuzzed: {'[' * 5000}{']' * 5000}\n",
    "many policies": HEAD
    + "".join(f"p{n}: {{_target_: gradpolicy.Stop, modules: nosuch}}\n" for n in range(300)),
}


@st.composite
def right_policies(draw: st.DrawFn) -> Case:
    """Draw a valid policy, with its keys in any order."""
    node = draw(RIGHT)
    node = {key: node[key] for key in draw(st.permutations(list(node)))}
    return draw(_cases("a right policy", node, ACCEPT))


@st.composite
def wrong_policies(draw: st.DrawFn) -> Case:
    """Draw a policy with an invalid value, an invalid name, or an invalid key of Hydra."""
    node = draw(RIGHT)
    way = draw(st.sampled_from(("value", "name", "hydra")))
    if way == "value":
        below, key = draw(st.sampled_from([(below, key) for below, key in _places(node) if key in WRONG]))
        below[key] = copy.deepcopy(draw(st.sampled_from(WRONG[key])))
        return draw(_cases("a wrong entry", node, REFUSE, ("policy",)))
    if way == "hydra":
        key, value = draw(st.sampled_from(HYDRAS))
        return draw(_cases(f"a wrong {key}", {**node, key: value}, REFUSE))
    known = {"argument", "output", "inside", "calls", "at", "seed", *WRONG}
    key = draw(st.sampled_from([key for key in node if key != "_target_"] or ["modules"]))
    name = draw(misspelt(key, known))
    return draw(
        _cases(
            "an unknown entry", {**node, name: draw(st.sampled_from((None, 3, "abc", [])))}, REFUSE, (name,)
        )
    )


@st.composite
def odd_policies(draw: st.DrawFn) -> Case:
    """Draw a policy in which one to three entries are missing, arbitrary, or equal to another."""
    node = draw(RIGHT)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(node))
        if not places:
            break
        below, key = draw(st.sampled_from(places))
        other, other_key = draw(st.sampled_from(places))
        value = draw(
            ODD
            | st.sampled_from(([below[key]], {key: below[key]}, copy.deepcopy(other[other_key])))
            | st.none()
        )
        if value is None:
            del below[key]
        else:
            below[key] = value
    return draw(_cases("an odd policy", node, EITHER))


@st.composite
def dangerous_policies(draw: st.DrawFn) -> Case:
    """Draw a policy that runs code: a node at any key, or the name of an untrusted module."""
    if draw(st.booleans()):
        name = draw(st.sampled_from(NAMES))
        rule = {"_target_": "gradpolicy.UseRule", "rule": name, "ops": ["round"]}
        surrogate = {"_target_": "gradpolicy.StraightThrough", "surrogate": name, "ops": ["relu"]}
        modules = {"_target_": "gradpolicy.Stop", "modules": ["model.probe", f"!{name}"]}
        mask: Node = {"_target_": "gradpolicy.Freeze", "mask": name}
        scored = {**mask, "mask": {"_target_": "gradpolicy.masks.TopK", "density": 0.1, "by": name}}
        node: Node = draw(st.sampled_from((rule, surrogate, modules, mask, scored)))
        return draw(_cases("a stranger's name", node, REFUSE, ("policy",)))
    evil, node = draw(dangerous_nodes()), draw(RIGHT)
    below, key = draw(st.sampled_from([*_places(node), ({}, "")]))
    below[key] = evil["_target_"] if key == "_target_" else evil
    tried = node if key else draw(st.sampled_from((evil, {**node, "more": evil})))
    # The key, where a harmless class of torch.nn, found in another module, is no value for an argument.
    return draw(_cases("a dangerous node", tried, REFUSE, (evil["_target_"], "_target_", "policy.fuzzed")))


@st.composite
def allowed_policies(draw: st.DrawFn) -> Case:
    """Draw a rule of another package, which is valid if the command line allows the package."""
    node = {"_target_": "gradpolicy.UseRule", "rule": "stranger.rule", "ops": ["relu"]}
    case = draw(_cases("what was allowed", node, ACCEPT))
    # This package is harmless: its import does not write the file.
    friend = FILES["stranger.py"].replace(PYTHON.encode(), b"")
    arguments = (*case.arguments, "allowed_targets=[stranger]")
    return Case(case.what, arguments, ACCEPT, files={**case.files, "stranger.py": friend}, holds=case.holds)


@st.composite
def odd_files(draw: st.DrawFn) -> Case:
    """Draw a file that is not a policy, sets other keys, or has changed characters."""
    known = {**WRONG_FILES, **EXAMPLES["odd_files"]}
    what = draw(st.sampled_from([*sorted(known), "scratched"]))
    text = known.get(what) or draw(scratched(HEAD + yaml.safe_dump({"fuzzed": draw(RIGHT)}, sort_keys=False)))
    files = {**FILES, FILE: text.encode(errors="surrogateescape")}
    return Case(f"file: {what}", CHOSEN, REFUSE if what in WRONG_FILES else EITHER, files=files)


def cases() -> SearchStrategy[Case]:
    """Return the strategy of all policies."""
    return st.one_of(
        right_policies(),
        wrong_policies(),
        odd_policies(),
        dangerous_policies(),
        allowed_policies(),
        odd_files(),
    )


@st.composite
def _cases(
    draw: st.DrawFn, what: str, node: Node, expectation: Expectation, names: tuple[str, ...] = ()
) -> Case:
    """Draw a case with the node in a file or on the command line."""
    # The value of a reference is not known here.
    holds = {"policy.fuzzed": node} if "${" not in repr(node) else {}
    if draw(st.booleans()) or not _writable(node):
        text = HEAD + yaml.safe_dump({"fuzzed": node}, sort_keys=False, allow_unicode=True)
        # Lone surrogates are not text; in a file they are bytes that are not UTF-8.
        content = text.encode(errors="surrogateescape")
        return Case(what, CHOSEN, expectation, names, {**FILES, FILE: content}, holds)
    line = f"+policy.fuzzed={written(node)}"
    return Case(what, command("policy=straight_through", line), expectation, names, FILES, holds)


def _places(node: Any) -> Iterator[tuple[Node, str]]:
    """Yield every key of a tree of mappings, with the mapping that holds it."""
    for key, value in list(node.items()):
        yield node, key
        if isinstance(value, dict):
            yield from _places(value)


def _writable(node: Any) -> bool:
    """Return True if Hydra's grammar can express it, which has no empty keys."""
    if isinstance(node, dict):
        return all(key != "" and _writable(value) for key, value in node.items())
    return all(map(_writable, node)) if isinstance(node, list) else True
