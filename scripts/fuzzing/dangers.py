"""Nodes and files that no config may run: callables, loaders as arguments, and pickles with code."""

import io
import os
import pickle
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator
from functools import cache
from typing import Any

from hypothesis import strategies as st

from gradpolicy.errors import PolicyError
from gradpolicy.imports import KNOWN, lies_in, limited_to
from gradpolicy.launch.kinds import LOADING_ARGUMENTS
from gradpolicy.launch.target_arguments import argument_names
from gradpolicy.launch.targets import locate_target
from gradpolicy.policies import Policy

# Code that runs writes this file, starts a program, or deletes the guarded file.
SHELL = "touch canary"
PYTHON = "open('canary', 'w').close()"


class RunsWhenRead:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (SHELL,)


class WritesWhenRead:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (PYTHON,)


EVIL_PICKLE = pickle.dumps({"state_dict": {}, "more": [RunsWhenRead(), WritesWhenRead()]}, protocol=2)


def archive(members: dict[str, bytes]) -> bytes:
    """Return a ZIP archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


FILES = {
    "guarded/keep.txt": b"mine\n",
    "evil.pkl": EVIL_PICKLE,
    "evil.zip": archive({"evil/data.pkl": EVIL_PICKLE}),
    # A module that writes the file when it is imported, and the files that torch.hub reads.
    "stranger.py": f"{PYTHON}\n\n\ndef rule(grad, inputs, output):\n    return grad\n".encode(),
    "hubconf.py": f"{PYTHON}\n\n\ndef model():\n    return None\n".encode(),
}
# Arguments with which most dangerous callables would write the file.
ARGUMENTS: tuple[dict[str, Any], ...] = (
    *({"_args_": [text]} for text in (SHELL, PYTHON, "evil.pkl", "stranger", "guarded", "guarded/keep.txt")),
    *({name: SHELL} for name in ("command", "cmd", "args")),
    *({name: "evil.pkl"} for name in ("f", "file", "path", "filename", "checkpoint_path", "path_or_url")),
    {"config": {"_target_": "os.system", "command": SHELL}},
    {"repo_or_dir": ".", "model": "model", "source": "local"},
    {"_args_": ["stranger"], "trust_remote_code": True},
)
# Arguments other than `_target_` that are looked up by name: rules, surrogates, modules.
NAMES = ("stranger.rule", "stranger.Nothing", "os.system", "builtins.exec", "torch.load", "antigravity")


@st.composite
def dangerous_nodes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a node whose target is any callable that is not allowed for a policy."""
    return {"_target_": draw(st.sampled_from(callables())), **draw(st.sampled_from(ARGUMENTS))}


@st.composite
def loading_nodes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an allowed node with an argument that has a loader at some depth."""
    name, arguments = draw(st.sampled_from(allowed()))
    loader = draw(st.sampled_from(sorted(LOADING_ARGUMENTS)))
    value: Any = {
        loader: draw(st.sampled_from(("evil.pkl", "./stranger", {"AutoModel": "stranger--x.Nothing"})))
    }
    for nested in draw(st.lists(st.booleans(), max_size=2)):
        value = [value] if nested else {"deep": value}
    return {"_target_": name, draw(st.sampled_from(arguments)): value}


@cache
def allowed() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the imported callables that a config may build, each with its arguments."""
    found = {}
    with limited_to(()):
        for name in callables(KNOWN):
            try:
                names, takes_any = argument_names(locate_target("x", {"_target_": name}))
            except PolicyError:
                continue
            found[name] = (*names, *(["anything"] if takes_any else []))
    return tuple((name, arguments) for name, arguments in found.items() if arguments)


@cache
def callables(packages: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the public callables of some packages, or of all modules, except for policies.

    They include those of modules imported by other modules: ``torch.functional.torch.load``.
    """
    with warnings.catch_warnings():
        # Some names warn on access.
        warnings.simplefilter("ignore")
        return tuple(sorted(set(_walk(packages))))


def _walk(packages: tuple[str, ...]) -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        public = not any(part.startswith("_") for part in name.split("."))
        wanted = not packages or lies_in(name, packages)
        if not (public and wanted and isinstance(module, types.ModuleType)):
            continue
        yield from _names(name, module, with_policies=bool(packages))
        if lies_in(name, KNOWN) and not packages:
            for attribute, inner in sorted(vars(module).items()):
                if isinstance(inner, types.ModuleType):
                    yield from _names(f"{name}.{attribute}", inner, with_policies=False)


def _names(path: str, module: types.ModuleType, *, with_policies: bool) -> Iterator[str]:
    for attribute, found in vars(module).items():
        # By its type: objects of other packages may claim to be of another class.
        wanted = with_policies or not (issubclass(type(found), type) and issubclass(found, Policy))
        if callable(found) and not attribute.startswith("_") and attribute.isidentifier() and wanted:
            yield f"{path}.{attribute}"
