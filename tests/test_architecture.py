"""Modules import each other only as docs/architecture.md draws it."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gradpolicy"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    # The project that `gradpolicy init` writes, and the configs, are data.
    if not {"starter", "conf"} & set(path.relative_to(PACKAGE).parts)
}

# ---- imports


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imports_of(module: str) -> frozenset[str]:
    """The package's modules that a module imports: anywhere in it, and for the type checker too."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return frozenset(found & MODULES.keys()) - {module}


@cache
def rooms() -> dict[str, str]:
    """The room of each folder and of each file on top of the package, as the picture names them."""
    drawn = re.findall(r"^    (\w+)\[([^\]]+)\]$", PAGE, flags=re.MULTILINE)
    return {name.strip(): room for room, label in drawn for name in label.split("·")}


def arrows() -> dict[str, set[str]]:
    """What each room may import, by the picture: all that arrows lead to."""
    drawn = re.findall(r"^    (\w+) --> ([\w &]+)$", PAGE, flags=re.MULTILINE)
    direct = {room: set(targets.split(" & ")) for room, targets in drawn}
    found: dict[str, set[str]] = {}
    for room in TopologicalSorter(direct).static_order():
        onward = direct.get(room, set())
        found[room] = onward.union(*(found[target] for target in onward))
    return found


def room_of(module: str) -> str:
    return rooms()[module.split(".")[1]]


INSIDE = [module for module in MODULES if module != "gradpolicy"]


def test_the_picture_shows_every_room_and_no_other() -> None:
    missing = {module.split(".")[1] for module in INSIDE} ^ set(rooms())
    assert not missing, f"docs/architecture.md: the picture and the package differ in {missing}"
    assert set(rooms().values()) == set(arrows())


def test_the_first_line_of_a_module_says_in_few_words_what_it_is() -> None:
    for module, path in MODULES.items():
        words = (ast.get_docstring(tree_of(module)) or "").partition("\n")[0].split()
        assert 0 < len(words) <= 15, f"{path}: begin with a line of at most 15 words on what it is"
        assert words[0] not in ("What", "Whether"), path


SHARED_NAMES = {
    "base.py": "what the files of its folder have in common",
    "resume.py": "the subcommand, and what it does by Lightning",
}


def test_no_two_files_share_a_name_without_reason() -> None:
    names = Counter(path.name for path in MODULES.values())
    shared = {name for name, count in names.items() if count > 1} - {"__init__.py"}
    assert shared == SHARED_NAMES.keys(), f"rename a file, or say in SHARED_NAMES of {__file__} why not"


def test_no_module_imports_in_a_circle() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter({module: imports_of(module) for module in INSIDE}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


def test_a_module_imports_only_rooms_that_arrows_lead_to() -> None:
    reached = arrows()
    for module in INSIDE:
        own = room_of(module)
        # Names are loaded from the package's top at their first use, which a module inside has no need of.
        assert "gradpolicy" not in imports_of(module), module
        upwards = {other for other in imports_of(module) if room_of(other) not in {own, *reached[own]}}
        assert not upwards, f"docs/architecture.md has no arrow from {module} in {own} to {upwards}"


def test_lightning_and_hydra_are_known_to_few_rooms() -> None:
    known: dict[str, set[str]] = {"lightning": set(), "hydra": set(), "accelerate": set()}
    for module in INSIDE:
        for line in MODULES[module].read_text().splitlines():
            found = re.match(r"\s*(?:from|import) (lightning|hydra|accelerate)\b", line)
            if found:
                known[found[1]].add(room_of(module))
    assert known == {
        "lightning": {"train", "tasks", "insight", "app"},
        "hydra": {"app"},
        "accelerate": {"integrations"},
    }


def test_the_callback_for_transformers_needs_neither_lightning_nor_hydra() -> None:
    reached, new = set(), {"gradpolicy.integrations.transformers"}
    while new:
        reached |= new
        new = set().union(*map(imports_of, new)) - reached
    for module in reached:
        assert not re.search(r"^\s*(from|import) (lightning|hydra)\b", MODULES[module].read_text(), re.M), (
            module
        )


# ---- ways through the files


def test_a_mask_passes_eleven_files_at_most_and_a_rule_seven() -> None:
    for way, most in (("mask", 11), ("rule", 7)):
        _, _, section = PAGE.partition(f"## The way of a {way}\n")
        passed = re.findall(
            r"^\| \d+ \| `([\w/]+\.py)` \|", section.partition("\n## ")[0], flags=re.MULTILINE
        )
        assert 0 < len(passed) <= most, way
        assert all((PACKAGE / path).is_file() for path in passed), way


# ---- private parts of other libraries

OTHERS = {"torch", "lightning", "hydra", "omegaconf", "accelerate", "transformers", "deepspeed"}
FRAMES = {"f_locals", "f_back", "__code__", "_getframe", "currentframe"}


LOOPS = {"trainer", "fit_loop", "epoch_loop", "strategy", "accelerator", "engine", "connector"}


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach", "_pytree"))


def uses_a_private_part(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OTHERS:
        assert node.module is not None
        return "_pytree" not in node.module and any(
            map(is_private, [*node.module.split("."), *(alias.name for alias in node.names)])
        )
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else root_of(node.value)
        return node.attr in FRAMES or (
            is_private(node.attr) and (root_of(node.value) in OTHERS or owner in LOOPS)
        )
    if isinstance(node, ast.Assign):
        return any(
            isinstance(target, ast.Attribute) and target.attr == "__class__" for target in node.targets
        )
    return False


def test_private_parts_of_other_libraries_are_few_and_listed_with_a_reason() -> None:
    used = {
        str(MODULES[module].relative_to(PACKAGE)): lines
        for module in MODULES
        if (lines := {node.lineno for node in ast.walk(tree_of(module)) if uses_a_private_part(node)})
    }
    _, _, section = PAGE.partition("## Private parts of other libraries")
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", section.partition("\n## ")[0], flags=re.MULTILINE))
    assert listed == used.keys(), "docs/architecture.md lists each file that uses a private part"
    assert len(used) <= 10
    assert sum(map(len, used.values())) <= 21, used
