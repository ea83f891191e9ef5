"""The command ``gradpolicy schema``: JSON schemas by which editors complete and check config files.

Pydantic makes them from docstrings and signatures, by which a run also checks its config.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union, get_args

from docstring_parser import parse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, WithJsonSchema, models_json_schema

from gradpolicy.checks import check_free
from gradpolicy.commands.search_space import SearchSpace
from gradpolicy.errors import PolicyError, constructors
from gradpolicy.imports import follow
from gradpolicy.launch.config import NAMED_NODES, Paths, Settings
from gradpolicy.launch.kinds import KIND_AT
from gradpolicy.launch.target_arguments import KEY_TYPES, adapter_of, argument_names
from gradpolicy.masks import MaskSource
from gradpolicy.policies import Policy
from gradpolicy.when import When

Schema = dict[str, Any]

ENDING = ".schema.json"
# The first line marks the files of this command, so that no other file is replaced.
WRITER = '{"$comment": "written by gradpolicy schema",'
# The packages and modules whose classes editors suggest, by the first path of each class.
ROOMS = ("gradpolicy.tasks", "gradpolicy.insight", "gradpolicy.lightning", "gradpolicy.distributed")
PACKAGES = (
    *("gradpolicy", "gradpolicy.masks", "gradpolicy.schedules", *ROOMS),
    *("lightning.pytorch", "lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
    *("lightning.pytorch.profilers", "lightning.pytorch.strategies", "torch.optim"),
)
KINDS = {
    kind.rpartition(".")[2]: kind
    for kind in (*(kind for kind, _ in KIND_AT.values()), "gradpolicy.schedules.Schedule", "torch.nn.Module")
}
# The keys of a config with one node of a kind; the files of these groups are such nodes.
NODES = {key: kind.rpartition(".")[2] for key, (kind, _) in KIND_AT.items() if "." not in key}
GROUPS = {key: KIND_AT[f"{key}.*"][0].rpartition(".")[2] for key in NAMED_NODES}

REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "A reference: ${key}"}
DEFAULTS: Schema = {"type": "array", "description": "Hydra's defaults list."}
# A class of a user's package may have any name and arguments.
FOREIGN: Schema = {"type": "string", "pattern": r"^(?!gradpolicy\.)"}
# Parts of a task or of Lightning, for which there are too many kinds.
PART: Schema = {"type": "string", "pattern": r"^(?!gradpolicy\.((masks|schedules)\.)?\w+$)"}
ANY_NODE: Schema = {"type": "object", "required": ["_target_"], "properties": {"_target_": PART}}
# Pydantic would search its own definitions for a "$ref".
REF = "$kind"


def _refer(name: str) -> Schema:
    return {REF: f"#/definitions/{name}"}


Reference = Annotated[str, WithJsonSchema(_refer("reference"))]
Node = Annotated[dict[str, Any], WithJsonSchema(_refer("node"))]


def main(arguments: Sequence[str]) -> int:
    """Run ``gradpolicy schema``, and return its exit code.

    Raises:
        PolicyError: If a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="gradpolicy schema",
        description="Write JSON schemas of config files, for editors (docs/editors.md).",
    )
    parser.add_argument("directory", nargs="?", default="conf", help="the directory; default: conf")
    try:
        written = write_schemas(Path(parser.parse_args(arguments).directory))
    except OSError as error:
        raise PolicyError(f"DIR: {error.filename}: {error.strerror}") from error
    print(*written, sep="\n")
    return 0


def write_schemas(directory: Path) -> list[Path]:
    """Write a schema for each kind of config file, and return their paths.

    Raises:
        PolicyError: If a file with one of their names exists that this command did not write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = {directory / f"{name}{ENDING}": schema for name, schema in schemas().items()}
    for path in paths:
        check_free(
            "DIR",
            path,
            "schema that gradpolicy wrote",
            lambda path: path.read_bytes().startswith(WRITER.encode()),
        )
    for path, schema in paths.items():
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        path.write_text(f"{WRITER}\n{text[1:]}\n", "utf-8")
    return list(paths)


def schemas() -> dict[str, Schema]:
    """Return the schema of each kind of config file, by name.

    All refer to ``classes``, which defines the arguments of every class.
    """
    files: dict[str, Schema] = {
        "classes": {"definitions": _definitions()},
        "train": {"$ref": f"experiment{ENDING}"},
        "experiment": _job(),
        "mask": {"allOf": [_node("MaskSource")], "required": ["_target_"]},
        "paths": {**TypeAdapter(Paths).json_schema(), "required": []},
        "sweep": TypeAdapter(SearchSpace).json_schema(ref_template="#/definitions/{model}"),
    }
    files["sweep"]["definitions"] = files["sweep"].pop("$defs")
    for name, kind in NODES.items():
        files[name] = _node(kind)
    for name, kind in GROUPS.items():
        files[name] = _group({"if": {"type": "object"}, "then": {**_node(kind), "required": ["_target_"]}})
        files[name]["properties"] = {"defaults": DEFAULTS}
    return {
        name: {"$schema": "http://json-schema.org/draft-07/schema#"} | file for name, file in files.items()
    }


def _node(kind: str) -> Schema:
    return {"allOf": [{"$ref": f"classes{ENDING}#/definitions/{kind}Node"}]}


def _group(node: Schema) -> Schema:
    """Return the schema of nodes by names that the user chooses; null removes one."""
    return {"type": "object", "additionalProperties": {"type": ["object", "null"], **node}}


def _job() -> Schema:
    """Return the schema of a job's keys, which may set a node in part."""
    schema = TypeAdapter(Settings).json_schema(ref_template="#/definitions/{model}")
    properties = schema["properties"]
    for name, kind in NODES.items():
        properties[name] = {"type": ["object", "null"], **_node(kind)}
    for name, kind in GROUPS.items():
        properties[name] = _group(_node(kind)) | {"type": ["object", "null"]}
    schema["properties"] = {name: {"anyOf": [each, REFERENCE]} for name, each in properties.items()}
    schema["properties"] |= {"defaults": DEFAULTS, "hydra": {"type": "object"}}
    definitions = schema.pop("$defs")
    definitions["Paths"].pop("required")
    return schema | {"definitions": definitions, "required": []}


# ---- classes and their arguments


class Generator(GenerateJsonSchema):
    """Pydantic's generator, with nodes in place of objects."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: a title would repeat the key."""
        return False

    def is_instance_schema(self, schema: Any) -> Schema:
        """Return a node of the class's kind."""
        name = schema["cls"].__name__
        return _refer(f"{name}Node" if name in KINDS else "node")

    def model_schema(self, schema: Any) -> Schema:
        """Return any object for a model of a library, whose defaults may differ from process to process."""
        own = schema["cls"].__module__.startswith("gradpolicy.")
        return super().model_schema(schema) if own else {"type": "object"}

    def dataclass_schema(self, schema: Any) -> Schema:
        """Return a node of the class's kind."""
        return self.is_instance_schema(schema)

    def is_subclass_schema(self, schema: Any) -> Schema:
        """Return any node."""
        return _refer("node")

    def callable_schema(self, schema: Any) -> Schema:
        """Return any node, or one of a schedule."""
        return {"anyOf": [_refer("node"), _refer("ScheduleNode")]}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
        """Return any node."""
        return _refer("node")


def _definitions() -> dict[str, Schema]:
    """Return the schema of each class's arguments, and the classes of each kind of node."""
    targets = {name: found for name, found in _targets().items() if not inspect.isabstract(found)}
    models = {target: _arguments_of(target) for target in targets.values()}
    references, generated = models_json_schema(
        [(model, "validation") for model in models.values()],
        ref_template="#/definitions/{model}",
        schema_generator=Generator,
    )
    definitions: dict[str, Schema] = generated["$defs"]
    name_of = {
        target: references[model, "validation"]["$ref"].rpartition("/")[2] for target, model in models.items()
    }
    for name in name_of.values():
        _add_keys(definitions[name])
    for name, kind in KINDS.items():
        paths: dict[str, list[str]] = {}
        for path, target in targets.items():
            if issubclass(target, follow(kind)):
                paths.setdefault(name_of[target], []).append(path)
        definitions[f"{name}Node"] = _kind(paths, definitions)
    definitions |= {"reference": REFERENCE, "node": ANY_NODE, "defaults": DEFAULTS}
    definitions |= {key: TypeAdapter(annotation).json_schema() for key, annotation in KEY_TYPES.items()}
    return json.loads(json.dumps(definitions).replace(f'"{REF}":', '"$ref":'))


def _kind(paths: dict[str, list[str]], definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a node, whose `_target_` determines its arguments.

    A node without a `_target_` sets some arguments of a node in another file, so it may have those of any
    class.

    Args:
        paths: The paths of each class of the kind, by the name of its definition.
        definitions: The schemas of the classes' arguments.
    """
    branches = [
        {"if": {"required": ["_target_"], "properties": {"_target_": {"enum": each}}}, "then": _refer(name)}
        for name, each in paths.items()
    ]
    arguments: dict[str, dict[str, Schema]] = {}
    for name in paths:
        for key, schema in definitions[name]["properties"].items():
            arguments.setdefault(key, {}).setdefault(str(schema), _refer(f"{name}/properties/{key}"))
    properties = {key: {"anyOf": list(each.values())} for key, each in arguments.items()}
    offered = [path for each in paths.values() for path in each]
    return {
        "type": "object",
        "properties": {"_target_": {"anyOf": [{"enum": offered}, FOREIGN]}},
        "if": {"required": ["_target_"]},
        "then": {"allOf": branches},
        "else": {"properties": properties, "additionalProperties": False},
    }


def _add_keys(definition: Schema) -> None:
    """Add the keys of every node to the arguments of a class."""
    definition.setdefault("properties", {}).update({key: _refer(key) for key in (*KEY_TYPES, "defaults")})
    required = definition.pop("required", None)
    if required:
        built_later = {"anyOf": [{"required": ["_partial_"]}, {"required": ["_args_"]}]}
        definition |= {"if": {"not": built_later}, "then": {"required": required}}


def _arguments_of(target: type) -> type[BaseModel]:
    """Return a model whose fields are the arguments of a class."""
    parameters, takes_any = argument_names(target)
    summary, descriptions = documentation(target)
    # Fields get other names, since many arguments would hide methods of pydantic.
    fields: dict[str, Any] = {}
    required = inspect.signature(target).parameters
    for index, (name, parameter) in enumerate(parameters.items()):
        default = None if parameter.default is parameter.empty else parameter.default
        if parameter.default is parameter.empty and name in required:
            default = ...
        field = Field(default, alias=name, description=descriptions.get(name))
        fields[f"argument{index}"] = (_type_of(parameter), field)
    # A mask source takes any argument only to report unknown ones.
    takes_others = takes_any and not issubclass(target, MaskSource)
    config = ConfigDict(arbitrary_types_allowed=True, extra="allow" if takes_others else "forbid")
    return create_model(target.__name__, __config__=config, __doc__=summary, **fields)


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return an argument's annotation with the alternatives in configs; any type if it has none."""
    annotation = parameter.annotation
    if annotation in (parameter.empty, Any):
        return Any
    adapter = adapter_of(annotation)
    if adapter is None or not adapter.pydantic_complete:
        return Any
    if When in get_args(annotation):
        # Its schema has the keys of the class.
        annotation = When
    alternatives = [annotation, Reference, Node, *([None] if parameter.default is None else [])]
    return Union[tuple(alternatives)]  # noqa: UP007


def documentation(target: type) -> tuple[str, dict[str, str]]:
    """Return the docstring of a class, and those of its arguments.

    Example:
        >>> from gradpolicy.schedules import Constant
        >>> documentation(Constant)
        ('The same number at every count.', {'value': 'The number.'})
    """
    owners = [base for base in target.__mro__ if "__init__" in vars(base)] or [target]
    if issubclass(target, Policy | MaskSource):
        owners = owners[: len(constructors(target))]
    arguments: dict[str, str] = {}
    for owner in owners:
        for parameter in parse(inspect.getdoc(owner) or "").params:
            text = " ".join((parameter.description or "").replace("``", "`").split())
            arguments.setdefault(parameter.arg_name.lstrip("*"), text)
    summary = parse(inspect.getdoc(target) or "").short_description or ""
    return " ".join(summary.replace("``", "`").split()), arguments


def _targets() -> dict[str, type]:
    """Return the classes that editors suggest, by path."""
    kinds = tuple(map(follow, KINDS.values()))
    found: dict[str, type] = {}
    for module in _modules():
        for name in getattr(module, "__all__", None) or vars(module):
            target = getattr(module, name)
            if name.startswith("_") or not inspect.isclass(target) or not issubclass(target, kinds):
                continue
            if hasattr(module, "__all__") or target.__module__.startswith(module.__name__):
                found[f"{module.__name__}.{name}"] = target
    return found


def _modules() -> Iterator[ModuleType]:
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield package
        if name in ROOMS:
            for each in sorted(
                pkgutil.walk_packages(package.__path__, f"{name}."), key=lambda each: each.name
            ):
                yield importlib.import_module(each.name)
