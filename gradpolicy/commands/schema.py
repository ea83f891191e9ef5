"""JSON schemas of config files, so that editors complete keys, show what they mean and underline wrong ones.

They are made from the signatures by which :mod:`gradpolicy.launch.target_arguments` checks a config, and
from the docstrings. A schema knows the classes of this package, of Lightning and of torch that a config may
name; what a person's own package holds may have any arguments. Where a value stands a reference may stand,
such as ``${seed}``.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from urllib.parse import quote

from docstring_parser import parse
from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from gradpolicy.checks import check_free
from gradpolicy.errors import PolicyError, constructors
from gradpolicy.imports import follow
from gradpolicy.launch import kinds
from gradpolicy.launch.config import Group, Node, Paths, Settings
from gradpolicy.launch.target_arguments import KEY_TYPES, PLAIN, argument_names
from gradpolicy.launch.targets import TARGET
from gradpolicy.masks import MaskSource
from gradpolicy.policies import Policy
from gradpolicy.when import When

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
ENDING = ".schema.json"
# How editors are told of a file's schema.
MODELINE = "# yaml-language-server: $schema="
# A reference to a definition, while schemas are made: pydantic would look for it among its own.
_OWN = "gradpolicy"
REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "A reference: ${key}"}
# The packages whose classes are listed: those that a config may name without being allowed to.
PACKAGES = ("gradpolicy", "lightning", "torch")
# Where the classes are looked for, in this order: the first name of a class is the one that editors offer.
HOMES = (
    *("gradpolicy", "gradpolicy.masks", "gradpolicy.schedules", "lightning.pytorch"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.profilers"),
    *("lightning.pytorch.strategies", "lightning.pytorch.plugins", "lightning.pytorch.plugins.environments"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
# ... and in all modules of these, but for what they import.
ROOMS = ("gradpolicy.tasks", "gradpolicy.insight", "gradpolicy.lightning", "gradpolicy.distributed")
# What a value may be made of where its annotation does not say.
ANY_VALUE = ("gradpolicy.masks.MaskSource", "gradpolicy.schedules.Schedule")

# A policy's time needs no `_target_`.
WHEN = "gradpolicy.When"
_NEEDS_TARGET: Schema = {"if": {"not": {"required": ["defaults"]}}, "then": {"required": [TARGET]}}

# The kinds of files: what stands in one is a node of this kind, ...
NODES = {
    "mask": "policy.*.mask",
    "model": "model",
    "data": "data",
    "optimizer": "optimizer",
    "trainer": "trainer",
}
# ... or several, by name.
GROUPS = {"policy": "policy.*", "callbacks": "callbacks.*", "logger": "logger.*"}
FILES = (*GROUPS, *NODES, "experiment", "train", "paths", "hydra", "sweep")


def main(arguments: Sequence[str]) -> int:
    """Runs ``gradpolicy schema``: writes a schema for each kind of file.

    Args:
        arguments: What follows ``gradpolicy schema``.

    Returns:
        The exit code: 0, or 2 if a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="gradpolicy schema",
        description="JSON schemas of config files, for editors (docs/editors.md).",
    )
    parser.add_argument("directory", nargs="?", default="conf", help="where they go; conf unless given")
    parser.add_argument(
        "--name-in-files", action="store_true", help="have each YAML file below it name its schema"
    )
    options = parser.parse_args(arguments)
    directory = Path(options.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = {name: directory / f"{name}{ENDING}" for name in FILES}
        for path in paths.values():
            check_free("DIR", path, "schema that gradpolicy wrote", is_written_here)
        for name, path in paths.items():
            path.write_text(as_text(schema_of(name)))
            print(path)
        for path in name_schemas(directory) if options.name_in_files else ():
            print(path)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except PolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def is_written_here(path: Path) -> bool:
    """Whether a file is a schema as this program writes it, of whatever version."""
    try:
        text = path.read_text("utf-8")
        schema = json.loads(text)
        return text == as_text(schema)
    # json raises ValueError, and RecursionError for what is nested too deeply.
    except (ValueError, RecursionError, AttributeError):
        return False


def as_text(schema: Schema) -> str:
    """A schema as it is written to a file: a line a definition."""
    definitions = schema.get("definitions", {})
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in schema.items() if key != "definitions"]
    defined = [f"  {json.dumps(key)}: {_compact(value)}" for key, value in definitions.items()]
    lines.append('"definitions": {\n' + ",\n".join(defined) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def schema_of(name: str) -> Schema:
    """The schema of one kind of file.

    Args:
        name: One of `FILES`.
    """
    if name == "train":
        return {"$schema": DRAFT, "allOf": [{"$ref": f"experiment{ENDING}"}]}
    builder = Builder(complete=name in (*GROUPS, "mask"), with_defaults=name in NODES)
    if name in NODES:
        schema = builder.node(kinds.KIND_AT[NODES[name]][0])
    elif name in GROUPS:
        schema = builder.group(kinds.KIND_AT[GROUPS[name]][0], with_defaults=True)
    elif name == "paths":
        schema = {**builder.annotated(Paths), "required": []}
    elif name == "hydra":
        schema = _hydra_schema(builder)
    elif name == "sweep":
        schema = SWEEP
    else:
        schema = builder.job()
    definitions = dict(sorted(builder.definitions.items()))
    return {"$schema": DRAFT, **_finished({"allOf": [schema], "definitions": definitions})}


DEFAULTS: Schema = {
    "type": "array",
    "description": "Which other files this one is composed of: Hydra's defaults list.",
    "items": {"type": ["string", "object"]},
}
# The format of W&B's sweeps, as `gradpolicy sweep` reads it.
SWEEP: Schema = {
    "type": "object",
    "required": ["parameters"],
    "properties": {
        "program": {"type": "string", "description": "What is run."},
        "method": {"enum": ["grid", "random", "bayes"], "description": "How values are chosen."},
        "metric": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "goal": {"enum": ["minimize", "maximize"]}},
        },
        "parameters": {
            "type": "object",
            "description": "What is tried, by the key of the config.",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "distribution": {"type": "string"},
                    "min": {"type": "number"},
                    "max": {"type": "number"},
                    "values": {"type": "array"},
                },
            },
        },
        "command": {"type": "array", "items": {"type": "string"}},
    },
}


class Builder:
    """Makes schemas, and the definitions to which they refer.

    Args:
        complete: Whether a node has its `_target_` and all required arguments. An experiment may set some
            arguments of a node that another file gives.
        with_defaults: Whether a node may hold a defaults list, as a file does.
    """

    def __init__(self, *, complete: bool, with_defaults: bool) -> None:
        self.complete = complete
        self.with_defaults = with_defaults
        self.definitions: dict[str, Schema] = {"reference": REFERENCE}
        for key, annotation in KEY_TYPES.items():
            self.definitions[key] = _or_reference(self.annotated(annotation))

    def group(self, kind: str, *, with_defaults: bool) -> Schema:
        """Nodes by names that a person chooses; null takes one away."""
        return {
            "type": "object",
            "properties": {"defaults": DEFAULTS} if with_defaults else {},
            "additionalProperties": {"anyOf": [self.node(kind), {"type": "null"}]},
        }

    def job(self) -> Schema:
        """The keys of a job."""
        properties: dict[str, Schema] = {"defaults": DEFAULTS, "hydra": {"type": "object"}}
        for name, field in Settings.model_fields.items():
            kind = kinds.KIND_AT.get(name) or kinds.KIND_AT.get(f"{name}.*")
            if kind and field.annotation in (Node, Node | None):
                properties[name] = {"anyOf": [self.node(kind[0]), {"type": "null"}]}
            elif kind and field.annotation == Group | None:
                properties[name] = {"anyOf": [self.group(kind[0], with_defaults=False), {"type": "null"}]}
            else:
                annotation: Any = field.annotation
                for extra in field.metadata:
                    annotation = _annotated(annotation, extra)
                found = self.annotated(annotation)
                found.pop("required", None)
                properties[name] = _or_reference(found)
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def node(self, kind: str) -> Schema:
        """A node of a kind of :mod:`gradpolicy.launch.kinds`.

        Its `_target_` is a class of that kind, and decides which arguments there are.
        """
        name = f"node of {kind}"
        if name not in self.definitions:
            self.definitions[name] = {}  # It may hold nodes of its own kind.
            self.definitions[name] = self._node((kind,))
        return _refer(name)

    def annotated(self, annotation: Any) -> Schema:
        """What pydantic makes of an annotation; anything where it can make nothing of it."""
        # These have settings of their own.
        own = isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))
        try:
            adapter = TypeAdapter(
                annotation, config=None if own else ConfigDict(arbitrary_types_allowed=True)
            )
            schema = adapter.json_schema(
                ref_template="#/definitions/{model}", schema_generator=_generator(self)
            )
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError):
            return {}
        self.definitions.update(schema.pop("$defs", {}))
        return schema

    def _node(self, kinds_of: tuple[str, ...]) -> Schema:
        classes = tuple(follow(kind) for kind in kinds_of)
        chosen = {
            paths: target
            for paths, target in known_targets().items()
            if (issubclass(target, classes) if isinstance(target, type) else kinds_of == ANY_VALUE)
        }
        for paths, target in chosen.items():
            self._define(paths[0], target)
        own = [path for paths in chosen for path in paths if path.startswith("gradpolicy.")]
        branches = [
            {
                "if": {"required": [TARGET], "properties": {TARGET: {"enum": list(paths)}}},
                "then": _refer(paths[0]),
            }
            for paths in chosen
        ]
        offered = [paths[0] for paths in chosen]
        # A person's own class may have any name, but one of this package is known. What a value that is not
        # annotated may be made of is known but for the parts of tasks.
        foreign = r"gradpolicy\.((masks|schedules)\.)?\w+$" if kinds_of == ANY_VALUE else r"gradpolicy\."
        others = "|".join(re.escape(path) for path in own)
        target_schema = {
            "description": "The class or function that is called with the other keys as its arguments.",
            "anyOf": [
                {"enum": offered},
                {"type": "string", "pattern": f"^(?!{foreign})|^({others})$"},
            ],
        }
        return {
            "type": "object",
            "properties": {TARGET: target_schema},
            **(_NEEDS_TARGET if self.complete and kinds_of != (WHEN,) else self._else(chosen)),
            **({"allOf": branches} if branches else {}),
        }

    def _else(self, chosen: Mapping[tuple[str, ...], Any]) -> Schema:
        """The arguments of every class there is, for a node whose class another file names."""
        found: dict[str, dict[str, Schema]] = {}
        free = False
        for paths in chosen:
            definition = self.definitions[paths[0]]
            free = free or definition.get("additionalProperties") is not False
            for name, schema in definition.get("properties", {}).items():
                # Said once, and referred to by the others.
                found.setdefault(name, {}).setdefault(str(schema), _refer(f"{paths[0]}/properties/{name}"))
        properties = {name: {"anyOf": list(each.values())} for name, each in found.items()}
        arguments = {"properties": properties, **({} if free else {"additionalProperties": False})}
        return {"if": {"required": [TARGET]}, "else": arguments}

    def _define(self, name: str, target: Callable[..., Any]) -> None:
        """Defines the arguments of a class or function, once."""
        if name in self.definitions:
            return
        self.definitions[name] = {}
        parameters, takes_any = argument_names(target)
        described, arguments = documentation(target)
        properties: dict[str, Schema] = {TARGET: {"type": "string"}}
        if self.with_defaults:
            properties["defaults"] = DEFAULTS
        properties |= {key: _refer(key) for key in KEY_TYPES if key != TARGET}
        for key, parameter in parameters.items():
            schema = self._argument(parameter)
            if key in arguments:
                schema["description"] = arguments[key]
            if parameter.default not in (None, inspect.Parameter.empty) and isinstance(
                parameter.default, PLAIN
            ):
                schema["default"] = parameter.default
            properties[key] = schema
        definition: Schema = {"description": described, "type": "object", "properties": properties}
        # A mask source takes any argument only to refuse the unknown by name.
        if not takes_any or (isinstance(target, type) and issubclass(target, MaskSource)):
            definition["additionalProperties"] = False
        required = _required(target)
        if self.complete and required:
            built_later = {"anyOf": [{"required": ["_partial_"]}, {"required": ["_args_"]}]}
            definition |= {"if": {"not": built_later}, "then": {"required": required}}
        self.definitions[name] = definition

    def _argument(self, parameter: inspect.Parameter) -> Schema:
        if parameter.annotation is inspect.Parameter.empty:
            return {}
        schema = self.annotated(parameter.annotation)
        if not schema:
            return {}
        alternatives = [*schema.get("anyOf", [schema]), self._any_value()]
        if When in get_args(parameter.annotation):
            # It may be a table, whose keys are those of the class.
            alternatives = [each for each in alternatives if each.get("type") != "object"]
        if parameter.default is None:
            alternatives.append({"type": "null"})
        return _or_reference(*alternatives)

    def _any_value(self) -> Schema:
        """Any argument may be built by a node of its own."""
        name = "node of any kind"
        if name not in self.definitions:
            self.definitions[name] = {}
            complete, self.complete = self.complete, True
            self.definitions[name] = self._node(ANY_VALUE)
            self.complete = complete
        return _refer(name)


def _hydra_schema(builder: Builder) -> Schema:
    """Hydra's own settings; those of a launcher or sweeper name their class, which is Hydra's."""
    from hydra.conf import HydraConf

    settings = builder.annotated(HydraConf)
    settings.pop("required", None)
    return {"if": {"required": [TARGET]}, "then": {"type": "object"}, "else": settings}


def _generator(builder: Builder) -> type[GenerateJsonSchema]:
    """A generator for which an object is a node that builds it."""

    class Generator(GenerateJsonSchema):
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

        def is_instance_schema(self, schema: Any) -> Schema:
            return self._of_class(schema["cls"])

        def dataclass_schema(self, schema: Any) -> Schema:
            if schema["cls"].__module__.startswith("hydra."):
                return super().dataclass_schema(schema)
            return self._of_class(schema["cls"])

        def model_schema(self, schema: Any) -> Schema:
            # W&B's settings have defaults that differ from process to process.
            own = schema["cls"].__module__.startswith("gradpolicy.")
            return super().model_schema(schema) if own else {"type": "object"}

        def is_subclass_schema(self, schema: Any) -> Schema:
            return builder._any_value()

        def callable_schema(self, schema: Any) -> Schema:
            return builder._any_value()

        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
            return builder._any_value()

        def _of_class(self, kind: type) -> Schema:
            for name in kinds_listed():
                if follow(name) is kind:
                    return builder.node(name)
            return builder._any_value()

    return Generator


@cache
def kinds_listed() -> tuple[str, ...]:
    """The kinds that configs may name, of the packages that are always there."""
    names = (*kinds.ARGUMENT_KINDS, *(kind for kind, _ in kinds.KIND_AT.values()))
    return tuple(dict.fromkeys(name for name in names if name.split(".")[0] in PACKAGES))


@cache
def known_targets() -> dict[tuple[str, ...], Any]:
    """The classes and functions that a config may name, each with its paths: the first is the shortest."""
    paths: dict[int, list[str]] = {}
    found: dict[int, Any] = {}
    classes = tuple(follow(name) for name in kinds_listed())
    for module in _modules():
        names = getattr(module, "__all__", None) if module.__name__ in HOMES else None
        for name in names or vars(module):
            target = getattr(module, name)
            if name.startswith("_") or not inspect.isclass(target) or inspect.isabstract(target):
                continue
            offered = module.__name__ in HOMES or target.__module__.startswith(module.__name__)
            if offered and issubclass(target, classes):
                found[id(target)] = target
                paths.setdefault(id(target), []).append(f"{module.__name__}.{name}")
    for name in kinds.FUNCTIONS:
        if name.split(".")[0] in PACKAGES:
            found[id(follow(name))] = follow(name)
            paths[id(follow(name))] = [name]
    return {tuple(dict.fromkeys(paths[key])): found[key] for key in paths}


def _modules() -> Iterator[ModuleType]:
    for home in HOMES:
        yield importlib.import_module(home)
    for room in ROOMS:
        package = importlib.import_module(room)
        yield package
        for found in sorted(pkgutil.walk_packages(package.__path__, f"{room}."), key=lambda each: each.name):
            yield importlib.import_module(found.name)


def documentation(target: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the docstrings say: of a class or function, and of each of its arguments.

    Example:
        >>> from gradpolicy.schedules import Constant
        >>> documentation(Constant)
        ('The same number at every count.', {'value': 'The number.'})
    """
    owners = [target]
    if isinstance(target, type):
        owners = [base for base in target.__mro__ if "__init__" in vars(base)] or owners
        if issubclass(target, Policy | MaskSource):
            owners = owners[: len(constructors(target))]
    arguments: dict[str, str] = {}
    for owner in owners:
        for parameter in parse(inspect.getdoc(owner) or "").params:
            text = " ".join((parameter.description or "").replace("``", "`").split())
            arguments.setdefault(parameter.arg_name.lstrip("*"), text)
    summary = parse(inspect.getdoc(target) or "").short_description or ""
    return " ".join(summary.replace("``", "`").split()), arguments


def _required(target: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.default is each.empty and each.kind in named]


def _annotated(annotation: Any, extra: Any) -> Any:
    from typing import Annotated

    return Annotated[annotation, extra]


def _or_reference(*alternatives: Schema) -> Schema:
    listed: list[Schema] = []
    for schema in alternatives:
        listed += [each for each in schema.get("anyOf", [schema]) if each not in listed]
    return {} if {} in listed else {"anyOf": [*listed, _refer("reference")]}


def _refer(name: str) -> Schema:
    return {_OWN: name}


def _finished(schema: Any) -> Any:
    """Makes references of our own into those of JSON, and drops pydantic's titles, which repeat names."""
    if isinstance(schema, dict):
        if _OWN in schema:
            return {"$ref": f"#/definitions/{quote(schema[_OWN])}"}
        return {
            key: _finished(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_finished(each) for each in schema] if isinstance(schema, list) else schema


def name_schemas(root: Path) -> list[Path]:
    """Puts the line that names its schema into each config file below a directory, or brings it up to date.

    Args:
        root: The directory of configs, where the schemas lie.

    Returns:
        The files that were written. Files of groups that have no schema are left alone.
    """
    written = []
    for path in sorted(root.rglob("*.yaml")):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise PolicyError(f"DIR: {path} is no text in UTF-8") from error
        inner = path.relative_to(root).parts
        group = inner[0] if len(inner) > 1 else "train"
        # A sweep of Hydra's is a job, and the others are of W&B's format.
        is_job = "# @package _global_" in text
        name = "experiment" if is_job else {"audit": "callbacks"}.get(group, group)
        if name not in FILES:
            continue
        lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MODELINE)]
        # Hydra reads its own comment in the first line only.
        place = 1 if lines and lines[0].startswith("# @package") else 0
        lines.insert(place, f"{MODELINE}{'../' * (len(inner) - 1) or './'}{name}{ENDING}\n")
        if "".join(lines) != text:
            # Whole or not at all, and where a link leads.
            target = path.resolve()
            part = target.with_name(f".{target.name}.part")
            part.write_text("".join(lines), "utf-8")
            part.chmod(target.stat().st_mode)
            part.replace(target)
            written.append(path)
    return written
