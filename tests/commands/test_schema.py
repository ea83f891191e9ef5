"""Editors complete and underline config files by schemas that agree with what a run refuses."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

import gradpolicy.masks
import gradpolicy.policies
from gradpolicy.commands import schema as command
from gradpolicy.commands.cli import main
from gradpolicy.launch.app import main as run_program
from gradpolicy.launch.target_arguments import argument_names, misfits
from gradpolicy.masks import MaskSource
from gradpolicy.policies import Freeze, Policy

schemas = cache(command.schemas)

CONF = Path(__file__).parents[2] / "conf"
# Hydra checks its own settings.
CONFIGS = sorted(set(CONF.rglob("*.yaml")) - set((CONF / "hydra").rglob("*.yaml")))
LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)")


@cache
def registry() -> Any:
    return Registry().with_resources(
        (f"{name}.schema.json", Resource.from_contents(schema)) for name, schema in schemas().items()
    )


def validator(kind: str) -> Any:
    schema = {"$ref": f"{kind}.schema.json"}
    return jsonschema.Draft7Validator(schema, registry=registry())


def is_valid(kind: str, text: str) -> bool:
    return validator(kind).is_valid(yaml.safe_load(text))


def test_each_is_a_schema() -> None:
    for schema in schemas().values():
        jsonschema.Draft7Validator.check_schema(schema)


def test_each_config_is_valid_by_the_schema_that_it_names() -> None:
    for config in CONFIGS:
        lines = config.read_text().splitlines()
        # Hydra reads its own comment in the first line only.
        line = LINE.fullmatch(lines[1] if lines[0].startswith("# @package") else lines[0])
        assert line is not None, config
        schema = (config.parent / line[1]).resolve()
        assert schema.parent == CONF, config
        found = yaml.safe_load(config.read_text())
        kind = schema.name.removesuffix(".schema.json")
        assert [error.message for error in validator(kind).iter_errors(found)] == [], config


def test_a_config_names_its_package_only_where_that_is_not_its_group() -> None:
    for config in CONFIGS:
        group = ".".join(config.relative_to(CONF).parts[:-1])
        named = re.match(r"# @package (\S+)", config.read_text())
        assert named is None or named[1] != group, config


POLICY = """
trunk:
  _target_: gradpolicy.Freeze
  params: trunk.*
  frozen_state: zero
  mask: {_target_: gradpolicy.masks.Random, density: 0.5, every: 5}
  when: {phases: [fit], start: 10}
"""


def test_a_policy_is_valid() -> None:
    assert is_valid("policy", POLICY)
    assert is_valid("policy", "mine: {_target_: my_package.MyPolicy, anything: 3}")
    assert is_valid("policy", "reverse: {_target_: gradpolicy.Reverse, factor: '${user.factor}', modules: a}")
    ramp = "{_target_: gradpolicy.schedules.Linear, start: 0, stop: 1, steps: 9}"
    assert is_valid("policy", f"reverse: {{_target_: gradpolicy.Reverse, modules: a, factor: {ramp}}}")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("frozen_state", "frozen_stat"),
        ("density", "densty"),
        ("phases", "phase"),
        ("0.5", "half"),
        ("start: 10", "start: early"),
        ("gradpolicy.Freeze", "gradpolicy.Freze"),
        ("gradpolicy.masks.Random", "gradpolicy.masks.Randum"),
        ("gradpolicy.masks.Random", "gradpolicy.Stop"),
        ("_target_: gradpolicy.Freeze", "start: 1"),
        ("  mask: {_target_: gradpolicy.masks.Random, density: 0.5, every: 5}\n", ""),
        ("trunk:\n", "trunk: 3\nother:\n"),
    ],
)
def test_what_is_wrong_in_a_policy_is_found(right: str, wrong: str) -> None:
    assert right in POLICY
    assert not is_valid("policy", POLICY.replace(right, wrong))


def test_an_experiment_may_set_some_arguments_of_a_policy() -> None:
    part = "policy: {trunk: {frozen_state: zero, mask: {density: 0.2}}}\ntrainer: {max_epochs: 3}"
    assert is_valid("experiment", part)
    for right, wrong in (
        ("frozen_state", "frozen_stat"),
        ("density", "densty"),
        ("0.2", "a lot"),
        ("max_epochs", "max_epoch"),
        ("trainer", "trianer"),
    ):
        assert not is_valid("experiment", part.replace(right, wrong))


def test_masks_and_trainers_are_known_too() -> None:
    assert is_valid("mask", "{_target_: gradpolicy.masks.Layerwise, active: 2, every: 20}")
    assert not is_valid("mask", "{_target_: gradpolicy.masks.Layerwise, activ: 2}")
    assert is_valid("trainer", "{defaults: [default], devices: 2}")
    assert not is_valid("trainer", "{defaults: [default], device: 2}")


def test_editors_show_what_the_docstrings_say() -> None:
    freeze = schemas()["classes"]["definitions"]["Freeze"]
    assert freeze["description"] == (Freeze.__doc__ or "").splitlines()[0]
    assert freeze["properties"]["params"]["description"].startswith("Globs on parameter names")
    assert freeze["properties"]["params"]["default"] == "*"
    own_and_inherited = freeze["properties"].keys() >= {"mask", "params", "when", "_target_"}
    assert own_and_inherited


VALUES = [3, -2, 0.25, "text", True, None, [1, 2], ["a", "b"], []]


@pytest.mark.slow
def test_a_schema_refuses_a_value_where_the_check_of_a_run_does() -> None:
    """Both are of one annotation: each argument of each policy and mask source, with values of each kind."""
    compared = 0
    definitions = schemas()["classes"]["definitions"]
    for kind in (*vars(gradpolicy.masks).values(), *vars(gradpolicy.policies).values()):
        known = isinstance(kind, type) and issubclass(kind, MaskSource | Policy)
        for key, parameter in (
            argument_names(kind)[0].items() if known and kind.__name__ in definitions else ()
        ):
            # The check can make nothing of some annotations.
            if not misfits(object(), parameter.annotation):
                continue
            argument = f"classes.schema.json#/definitions/{kind.__name__}/properties/{key}"
            schema = jsonschema.Draft7Validator({"$ref": argument}, registry=registry())
            for value in VALUES:
                is_default = value == parameter.default and type(value) is type(parameter.default)
                fits = is_default or not misfits(value, parameter.annotation)
                # Text and lists may be iterated over, and what stands in them is checked by the class.
                if not (fits and isinstance(value, str | list)):
                    assert schema.is_valid(value) == fits, (kind, key, value)
                    compared += 1
    assert compared > 1000


def test_schemas_are_written_again_over_the_ones_that_this_command_wrote(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command, "schemas", schemas)
    assert main(["schema", str(tmp_path)]) == 0
    assert main(["schema", str(tmp_path)]) == 0
    for name in schemas():
        assert json.loads((tmp_path / f"{name}.schema.json").read_text()).items() >= schemas()[name].items()


def test_a_place_that_cannot_be_written_is_refused(tmp_path, refusal) -> None:
    (tmp_path / "file").touch()
    assert refusal("schema", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("text", ["mine", ""])
def test_a_file_that_is_no_schema_of_ours_is_kept(tmp_path, text, refusal, monkeypatch) -> None:
    monkeypatch.setattr(command, "schemas", schemas)
    path = tmp_path / "trainer.schema.json"
    path.write_text(text)
    assert refusal("schema", str(tmp_path)).startswith(f"DIR: {path} is there already and is no schema")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == text


def test_tab_completes_groups_options_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, expected in (
        ("gradpolicy policy=guid", "policy=guided"),
        ("gradpolicy trainer.max_ep", "trainer.max_epochs="),
    ):
        monkeypatch.setenv("COMP_LINE", line)
        assert run_program(CONF, ["-sc", "query=bash"]) == 0
        assert capsys.readouterr().out.split() == [expected]
