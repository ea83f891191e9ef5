"""Where a policy acts: globs on module and parameter names, and module classes."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn

from gradpolicy.errors import PolicyError, nearest, shortened, shown, under
from gradpolicy.imports import import_by_name

ModulePattern = str | type[nn.Module]
Named = TypeVar("Named", bound=Tensor)

# The locations at a module where a policy may act, and the operations that are step functions.
BOUNDARIES = ("input", "output")
LOCATIONS = (*BOUNDARIES, "through")
STEP_OPERATIONS = ("round", "floor", "ceil", "trunc", "sign", "heaviside")

# Names that wrappers add to those of modules; patterns are written without them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ModelHook:
    """A hook on a module, which copies and pickles of the module do not have.

    Args:
        function: The hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook."""
        return self.function(*arguments)

    def __reduce__(self) -> Any:
        # A function of any arguments that does nothing, and needs nothing of this package to be loaded.
        return getattr, (nullcontext(), "__exit__")


def plain_name(name: str) -> str:
    """Return a qualified name without the parts that ``torch.compile``, checkpointing or FSDP add.

    Example:
        >>> plain_name("encoder._orig_mod.0.weight")
        'encoder.0.weight'
    """
    # All of them contain this; checking it first makes ten thousand plain names cheap.
    if "_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def as_patterns(patterns: object) -> tuple:
    """Return one pattern or several as a tuple; an empty tuple for None."""
    if patterns is None:
        return ()
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        return (patterns,)
    return tuple(patterns)


def match_names(patterns: str | Iterable[str], names: Iterable[str], kind: str) -> list[str]:
    """Select the names that the patterns match, in the order of the names.

    Args:
        patterns: Globs (``*`` also matches dots). A leading ``!`` excludes names. If all patterns exclude,
            all other names are selected.
        names: The names to select from.
        kind: What the names are, for the message: ``"module"`` or ``"parameter"``.

    Raises:
        PolicyError: If a pattern matches nothing (with the nearest names), or nothing is left.

    Example:
        >>> names = ["trunk.0.weight", "trunk.1.weight", "head.weight"]
        >>> match_names(["trunk.*", "!trunk.1.*"], names, "parameter")
        ['trunk.0.weight']
    """
    names = list(names)
    chosen = _select(patterns, kind, lambda pattern: _globbed(pattern, names, kind))
    return [name for name in names if name in chosen]


def _select(patterns: object, kind: str, find: Callable[[Any], Iterable[Hashable]]) -> set[Hashable]:
    """Return what patterns match without what those with ``!`` match, as ``find`` returns it for a pattern.

    Raises:
        PolicyError: If nothing is left.
    """
    written = as_patterns(patterns)
    unwanted = [each[1:] for each in written if isinstance(each, str) and each.startswith("!")]
    wanted = [each for each in written if not (isinstance(each, str) and each.startswith("!"))] or ["*"]
    chosen: set[Hashable] = set().union(*map(find, wanted))
    chosen -= set().union(*map(find, unwanted))
    if not chosen:
        raise PolicyError(f"{kind}s {shown(list(written))}: the '!' patterns exclude everything that matched")
    return chosen


def _globbed(
    pattern: object, names: Iterable[str], kind: str, modules: Mapping[str, nn.Module] | None = None
) -> list[str]:
    """Return the names that a glob matches.

    Args:
        pattern: The glob.
        names: The names.
        kind: What they name.
        modules: The modules of these names, for the message.

    Raises:
        PolicyError: If there are none; has the nearest names.
    """
    if not isinstance(pattern, str):
        raise PolicyError(f"{kind} pattern {shown(pattern)}: expected a string")
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        # The name of a module is not a parameter; suggest the parameters below it.
        candidates = _with_parents(names, ".*" if kind == "parameter" else "")
        hint = nearest(pattern.rstrip("*").rstrip("."), candidates)
        if modules and hint.startswith("valid names"):
            outer = sorted(filter(None, modules), key=lambda name: name.count("."))
            listed = [f"{name} ({type(modules[name]).__name__})" for name in outer]
            hint = f"the model has {shortened(listed, most=8)}"
        raise PolicyError(f"{kind} pattern {shown(pattern)} matches nothing; {hint}")
    return found


def match_modules(
    model: nn.Module, patterns: ModulePattern | Iterable[ModulePattern]
) -> dict[str, nn.Module]:
    """Return the modules that globs on qualified names, or module classes, match.

    The model itself has the name ``""`` and is matched by ``"*"``. A dotted path to a class
    (``"torch.nn.ReLU"``), as YAML writes it, means the class.

    Args:
        model: The model.
        patterns: Globs, classes or paths to classes; a glob or path with a leading ``!`` excludes.

    Raises:
        PolicyError: If a pattern matches nothing.
    """
    modules = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    chosen = _select(patterns, "module", lambda pattern: _match_modules(pattern, modules))
    return {name: module for name, module in modules.items() if name in chosen}


def match_parameters(model: nn.Module, patterns: str | Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that globs match, as :func:`pick` does.

    Raises:
        PolicyError: If a pattern matches nothing.
    """
    return pick(named_parameters(model), patterns)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by plain name; a shared parameter under each of its names."""
    return {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}


def once_each(named: Mapping[str, Named]) -> dict[str, Named]:
    """Return the tensors by name; a shared tensor under its first name only."""
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in named.items() if first.setdefault(id(tensor), name) == name}


def pick(named: Mapping[str, Named], patterns: str | Iterable[str]) -> dict[str, Named]:
    """Select the tensors whose names the globs match; a shared tensor by any of its names.

    Returns:
        The tensors in their order, a shared one under its first name.

    Raises:
        PolicyError: If a pattern matches nothing, or nothing is left.
    """

    def find(pattern: object) -> set[int]:
        return {id(named[name]) for name in _globbed(pattern, named, "parameter")}

    chosen = _select(patterns, "parameter", find)
    return {name: tensor for name, tensor in once_each(named).items() if id(tensor) in chosen}


def pick_each(
    named: Mapping[str, Named], params: Mapping[str, str | Iterable[str]]
) -> dict[str, dict[str, Named]]:
    """Select the tensors that each policy on parameters matches, as :func:`pick` does.

    Args:
        named: The tensors by name.
        params: The globs of each policy, by the policy's name.

    Raises:
        PolicyError: If a pattern matches nothing, under the key of its policy.
    """
    found = {}
    for name, patterns in params.items():
        with under(f"policy.{name}.params"):
            found[name] = pick(named, patterns)
    return found


def match_any(patterns: str | Iterable[str] | None, names: Iterable[str], kind: str) -> set[str]:
    """Return the names that patterns match, as :func:`match_names` does; none without patterns."""
    written = as_patterns(patterns)
    return set(match_names(written, names, kind)) if written else set()


def _match_modules(pattern: ModulePattern, modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(pattern, type):
        found = [name for name, module in modules.items() if isinstance(module, pattern)]
        if not found:
            classes = {type(module).__name__ for module in modules.values()}
            raise PolicyError(
                f"module class {shown(pattern.__name__)} matches nothing; "
                f"{nearest(pattern.__name__, classes)}"
            )
        return found
    if not isinstance(pattern, str):
        raise PolicyError(f"modules: expected a glob or a module class, got {shown(pattern)}")
    module_class = _class_at(pattern) if not any(fnmatchcase(name, pattern) for name in modules) else None
    if module_class is not None:
        return _match_modules(module_class, modules)
    return _globbed(pattern, modules, "module", modules)


def _class_at(path: str) -> type[nn.Module] | None:
    """Return the module class at a dotted path; None if there is none."""
    if "." not in path or any(sign in path for sign in "*?["):
        return None
    try:
        found = import_by_name(path)
    except PolicyError:
        return None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _with_parents(names: Iterable[str], below: str) -> set[str]:
    """Return every name, and the names of the modules above it with ``below`` appended."""
    names = set(names)
    parents = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)}
    return names | {parent + below for parent in parents}
