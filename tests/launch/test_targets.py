"""Which classes and functions a config may name."""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterable, Iterator

import lightning.pytorch
import pytest
import torch

import gradpolicy as gp
from gradpolicy.imports import KNOWN, limited_to
from gradpolicy.launch import targets
from gradpolicy.launch.kinds import HANDING_ON, LOADING_ARGUMENTS
from gradpolicy.launch.target_arguments import argument_names
from gradpolicy.launch.targets import build, locate_target

# What a constructor would call to run, unpickle, import or delete something.
DANGEROUS = re.compile(
    # Not `module.eval()`, which takes a module out of training.
    r"\b(exec|(?<!\.)eval|compile|__import__|import_module|system|[pP]open|run|call|rmtree|unlink|remove|rmdir|loads?|"
    r"extractall|urlretrieve|load_library)\("
)
# Looked at: it loads a file of its own package.
HARMLESS = {"torchmetrics.functional.image.dists.DISTSNetwork"}


@pytest.fixture(autouse=True)
def nothing_allowed() -> Iterator[None]:
    with limited_to(()):
        yield


def at(path: object, key: str = "user.part") -> object:
    return locate_target(key, {"_target_": path})


@pytest.mark.parametrize(
    ("key", "path", "found"),
    [
        ("optimizer", "torch.optim.AdamW", torch.optim.AdamW),
        ("model.model", "torch.nn.Sequential", torch.nn.Sequential),
        ("model.loss", "torch.nn.functional.cross_entropy", torch.nn.functional.cross_entropy),
        ("model.schedule", "torch.optim.lr_scheduler.StepLR", torch.optim.lr_scheduler.StepLR),
        ("policy.cut", "gradpolicy.Stop", gp.Stop),
        ("policy.cut.when", "gradpolicy.When", gp.When),
        ("policy.trunk.mask", "gradpolicy.masks.Random", gp.masks.Random),
        ("policy.trunk.mask.density", "gradpolicy.masks.Cubic", gp.masks.Cubic),
        ("policy.trunk.mask.by", "gradpolicy.masks.scores.LIFT", gp.masks.scores.LIFT),
        ("policy.back.factor", "gradpolicy.schedules.Ganin", gp.schedules.Ganin),
        ("policy.back.rule", "gradpolicy.get_rule", gp.get_rule),
        ("callbacks.stop", "lightning.pytorch.callbacks.Timer", lightning.pytorch.callbacks.Timer),
        ("trainer", "lightning.pytorch.Trainer", lightning.pytorch.Trainer),
    ],
)
def test_each_place_takes_classes_of_its_kind(key: str, path: str, found: object) -> None:
    assert at(path, key) is found


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("callbacks.mine", "torch.nn.ReLU"),
        ("logger.mine", "lightning.pytorch.callbacks.Timer"),
        ("model", "torch.nn.Linear"),
        ("model.model", "lightning.pytorch.Trainer"),
        ("optimizer", "torch.optim.lr_scheduler.StepLR"),
        ("policy.mine", "gradpolicy.masks.Random"),
        ("policy.mine.mask", "gradpolicy.Stop"),
        ("trainer", "lightning.pytorch.callbacks.Timer"),
        ("trainer.strategy", "lightning.pytorch.plugins.TorchCheckpointIO"),
    ],
)
def test_a_class_of_another_kind_is_refused_with_the_kind_that_is_needed(key: str, path: str) -> None:
    with pytest.raises(gp.PolicyError, match=rf"^{key}\._target_: '{path}' is not among .* it is no "):
        at(path, key)


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "torchvision.models.resnet18",
        "torch.randn",
        "torch.os.system",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "torch.jit.unsupported_tensor_ops.execWrapper",
        "torch.serialization.load",
        "torch.distributed.launcher.api.launch_agent",
        "torch.functional.torch.ops.load_library",
        "torch.nn.functional.torch.load",
        "torch.nn.functional.importlib.import_module",
        "torch.nn.modules.module.functools.partial",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils.data.datapipes.utils.decoder.basichandlers",
        "torch.fx.GraphModule",
        "torch.nn.Module.__init__.__globals__",
        "lightning.pytorch.LightningModule.load_from_checkpoint",
        "lightning.pytorch.plugins.io.TorchCheckpointIO.remove_checkpoint",
        "lightning.pytorch.utilities.migration.pl_legacy_patch",
        "gradpolicy.launch.app.main",
        "gradpolicy.launch.app.sys.exit",
        "gradpolicy.launch.targets.build",
        "gradpolicy.launch.app.hydra.utils.get_method",
        "gradpolicy.imports.import_by_name",
        "gradpolicy.imports.limited_to",
        "gradpolicy.whole_file.write_text",
    ],
)
@pytest.mark.parametrize("key", ["user.part", "callbacks.mine", "model.model"])
def test_what_could_do_anything_is_refused(key: str, path: str) -> None:
    with pytest.raises(gp.PolicyError, match=rf"^{key}\._target_: "):
        at(path, key)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim.AdmW", "did you mean 'Adam"),
        ("torch.optim.adamw.AdamX", "AdamW"),
        ("torch.nn.nosuch.Thing", "has no 'nosuch'"),
        ("torch.nn.modules", "is a module"),
        ("not a path", "dotted path"),
        (3, "dotted path"),
    ],
)
def test_what_does_not_exist_is_named_with_its_key(path: object, words: str) -> None:
    with pytest.raises(gp.PolicyError, match=f"^user.part._target_: .*{words}"):
        at(path)


def test_a_package_is_allowed_by_its_whole_name_only() -> None:
    with limited_to(["fractions"]):
        assert at("fractions.Fraction")
    with limited_to(["fraction"]), pytest.raises(gp.PolicyError, match=r"fractions\.Fraction"):
        at("fractions.Fraction")


def test_an_allowed_package_does_not_allow_what_it_imports(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kind_package.py").write_text(
        "import os\nimport shutil as tools\nfrom os import system as run\n\ndef own():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with limited_to(["kind_package"]):
        assert at("kind_package.own")() == 1
        for path in ("kind_package.run", "kind_package.os.system", "kind_package.tools.rmtree"):
            with pytest.raises(gp.PolicyError, match=r"user\.part\._target_"):
                at(path)


@pytest.mark.parametrize("extra", [{}, {"_recursive_": False}, {"_partial_": True}])
def test_nothing_is_built_below_that_may_not_be(extra: dict, capfd: pytest.CaptureFixture[str]) -> None:
    inner = {"_target_": "builtins.print", "_args_": ["this must not run"]}
    for node in ({"part": inner}, {"parts": [{"deep": inner}]}, {"_args_": [inner]}):
        with pytest.raises(gp.PolicyError, match=r"builtins\.print"):
            build({"_target_": "torch.nn.Sequential", **node, **extra}, "model.model")
    assert "this must not run" not in capfd.readouterr().out


def test_a_reference_that_the_check_has_not_seen_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    evil = "${oc.create:{_target_: builtins.print, _args_: [this must not run]}}"
    with pytest.raises(gp.PolicyError, match=r"^model\.model\.parts\[0\]: must not hold a reference"):
        build({"_target_": "torch.nn.Sequential", "parts": [evil]}, "model.model")
    assert "this must not run" not in capfd.readouterr().out


def test_the_object_that_was_checked_is_built_whatever_its_name_leads_to_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hydra is given objects: it looks no name up itself."""
    monkeypatch.setattr("hydra._internal.instantiate._instantiate2._locate", lambda path: pytest.fail(path))
    node = {
        "_target_": "torch.nn.ModuleDict",
        "modules": {"first": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}},
    }
    assert build(node, "model.model")["first"].out_features == 3


def test_the_innermost_node_that_failed_is_named_with_the_cause() -> None:
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": "x"}
    with pytest.raises(gp.PolicyError, match=r"^model\.model\.module: TypeError: "):
        build({"_target_": "torch.nn.ModuleDict", "module": inner}, "model.model")


# ---- Hugging Face's and timm's


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package in the place of transformers that makes its classes in the same ways."""
    package = types.ModuleType("transformers")
    package.__path__ = []

    def from_pretrained(kind: type, *arguments: object, **named: object) -> dict:
        return named

    from_pretrained.__module__ = "transformers.modeling_utils"
    body = {"__module__": "transformers.modeling_utils", "from_pretrained": classmethod(from_pretrained)}

    package.PreTrainedModel = type("PreTrainedModel", (torch.nn.Module,), body)
    package.PretrainedConfig = type("PretrainedConfig", (), body)
    package.BertModel = type(
        "BertModel", (package.PreTrainedModel,), {"__module__": "transformers.models.bert"}
    )
    package.Pipeline = type("Pipeline", (), body)
    monkeypatch.setitem(sys.modules, "transformers", package)
    targets._found_once.cache_clear()
    yield package
    targets._found_once.cache_clear()


def test_a_pretrained_model_is_made_without_code_of_its_repository(hugging_face) -> None:
    node = {"_target_": "transformers.BertModel.from_pretrained", "_args_": ["some/model"]}
    assert build(node, "model.model") == {"trust_remote_code": False}
    assert build({**node, "trust_remote_code": False}, "model.model") == {"trust_remote_code": False}


@pytest.mark.parametrize(
    "argument",
    [
        {"trust_remote_code": True},
        {"trust_remote_code": "yes"},
        {"use_kernels": True},
        {"attn_implementation": "somebody/kernel"},
        {"code_revision": "main"},
        {"weights_only": False},
        {"_attn_implementation": "somebody/kernel"},
        {"checkpoint_path": "evil.pkl"},
    ],
)
def test_what_would_load_code_is_refused(hugging_face, argument: dict) -> None:
    node = {"_target_": "transformers.BertModel.from_pretrained", "_args_": ["some/model"], **argument}
    with pytest.raises(gp.PolicyError, match=rf"model\.model\.{next(iter(argument))}: may not be set"):
        build(node, "model.model")


@pytest.mark.parametrize(
    "argument",
    [
        {"model_args": {"checkpoint_path": "evil.pkl"}},
        {"backbone_kwargs": {"weights_only": False}},
        {"text_config": {"per_layer": [{"0": {"_attn_implementation_internal": "somebody/kernel"}}]}},
        {"attribute_map": {"harmless": "attn_implementation"}, "harmless": "somebody/kernel"},
        {"vision_config": {"auto_map": {"AutoModel": "somebody/code--evil.Model"}}},
    ],
)
def test_what_would_load_code_is_refused_at_any_depth(hugging_face, argument: dict) -> None:
    name = next(iter(argument))
    for path in ("transformers.PretrainedConfig", "transformers.BertModel.from_pretrained"):
        with pytest.raises(gp.PolicyError, match=rf"^user\.part\.{name}.*: may not be set for {path}"):
            locate_target("user.part", {"_target_": path, **argument})
        with pytest.raises(gp.PolicyError, match=r"^user\.part\._args_\[0\]\..*: may not be set"):
            locate_target("user.part", {"_target_": path, "_args_": [argument]})


def test_what_timm_would_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = types.ModuleType("timm")
    timm.create_model = lambda model_name, pretrained=False, pretrained_cfg=None, **kwargs: None
    timm.create_model.__module__ = "timm.models"
    monkeypatch.setitem(sys.modules, "timm", timm)
    targets._found_once.cache_clear()
    node = {"_target_": "timm.create_model", "model_name": "resnet18", "pretrained": True}
    assert locate_target("model.model", node) is timm.create_model
    for argument in ({"checkpoint_path": "evil.pkl"}, {"block_args": {"pretrained_cfg_overlay": {}}}):
        with pytest.raises(gp.PolicyError, match=r"^model\.model\..*: may not be set for timm\.create_model"):
            locate_target("model.model", {**node, **argument})
    with pytest.raises(gp.PolicyError, match=r"^model\.model\._args_: .* by name"):
        locate_target("model.model", {"_target_": "timm.create_model", "_args_": ["resnet18", True]})
    targets._found_once.cache_clear()


def test_arguments_that_load_nothing_pass(hugging_face) -> None:
    node = {"model_args": {"depth": 3}, "attn_implementation": "sdpa", "text_config": {"use_kernels": False}}
    path = "transformers.BertModel.from_pretrained"
    assert callable(locate_target("user.part", {"_target_": path, "weights_only": True, **node}))


def test_other_classes_of_hugging_face_are_refused(hugging_face) -> None:
    for path in ("transformers.Pipeline", "transformers.Pipeline.from_pretrained"):
        with pytest.raises(gp.PolicyError, match="is not among"):
            at(path)


def test_a_long_name_is_shortened_wherever_the_message_says_it() -> None:
    with pytest.raises(gp.PolicyError, match="is not among") as caught:
        at("a" * 5000)
    assert len(str(caught.value)) < 400


# ---- every public callable there is

# A name by which an argument may say what to load.
LOADS = re.compile(
    r"path|file|url|repo|hub|checkpoint|ckpt|pretrained|(?<!off)load|(^|_)code|plugin|weights_only|model_name|args$"
)
# Looked at: these say what to write, count, switch or name, or what is read without running anything.
HARMLESS_ARGUMENTS = {
    "activation_checkpointing",
    "activation_checkpointing_policy",
    "add_file_policy",
    "baseline_path",
    "baseline_url",
    "checkpoint_io",
    "checkpoint_name",
    "config_filename",
    "console_kwargs",
    "cpu_checkpointing",
    "dirpath",
    "download",
    "exclude_batches_path",
    "filename",
    "files",
    "load_diag",
    "load_full_weights",
    "load_weights",
    "log_model_checkpoints",
    "multifile",
    "nvme_path",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "path",
    "precision_plugin",
    "pretrained",
    "save_code",
    "save_distributed_checkpoint",
    "save_weights_only",
    "synchronize_checkpoint_boundary",
    "table_kwargs",
    "validate_args",
}


def walk(path: Iterable[str], prefix: str) -> Iterator[pkgutil.ModuleInfo]:
    """Find all modules; those that cannot be imported here are left out, whatever error they raise."""
    return pkgutil.walk_packages(path, prefix, onerror=lambda name: None)


def public_callables(packages: tuple[str, ...] = KNOWN) -> Iterator[tuple[str, object]]:
    for package in packages:
        try:
            root = importlib.import_module(package)
        except ImportError:
            continue  # an extra that is not installed
        modules = [package, *(info.name for info in walk(root.__path__, f"{package}."))]
        for name in modules:
            if any(part.startswith("_") for part in name.split(".")):
                continue
            try:
                content = vars(importlib.import_module(name))
            except Exception:
                continue  # what a package cannot import here, no config can
            for attribute, value in list(content.items()):
                if callable(value) and not attribute.startswith("_"):
                    yield f"{name}.{attribute}", value


def allowed_callables(packages: tuple[str, ...] = KNOWN) -> dict[str, object]:
    """Each callable that a config may build, by one of its names."""
    found: dict[int, tuple[str, object]] = {}
    for path, value in public_callables(packages):
        if id(value) not in found:
            try:
                found[id(value)] = path, at(path)
            except gp.PolicyError:
                continue
    return dict(found.values())


@pytest.mark.filterwarnings("ignore")
def test_no_argument_of_an_allowed_callable_ends_in_a_loader() -> None:
    # Importing all models of these would take minutes; they are tried above.
    allowed = allowed_callables(tuple(package for package in KNOWN if package not in HANDING_ON))
    names: set[str] = set()
    for path, found in allowed.items():
        arguments, takes_any = argument_names(found)
        names |= set(arguments)
        for name in ("_args_", *arguments, *(["anything"] if takes_any else [])):
            node = {"_target_": path, name: [{"deep": {"checkpoint_path": "evil.pkl"}}]}
            with pytest.raises(gp.PolicyError, match=r"^user\.part\..*: may not be set for"):
                locate_target("user.part", node)
    assert len(allowed) > 300
    assert {name for name in names if LOADS.search(name)} - {*LOADING_ARGUMENTS, *HARMLESS_ARGUMENTS} == set()


def test_an_argument_that_loads_is_refused_without_its_name_too() -> None:
    path = "torchmetrics.multimodal.CLIPScore"
    for given in ({"model_name_or_path": "./jinaai"}, {"_args_": ["./jinaai"]}):
        with pytest.raises(gp.PolicyError, match=r"^user\.part\.model_name_or_path: may not be set"):
            locate_target("user.part", {"_target_": path, **given})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_public_callable_opens_a_door() -> None:
    accepted = allowed_callables()
    functions = {
        f"{value.__module__}.{value.__qualname__}"
        for value in accepted.values()
        if not isinstance(value, type)
    }
    dangerous = {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in accepted.values()
        if isinstance(kind, type) and any(DANGEROUS.search(source) for source in constructors(kind))
    }
    assert len(accepted) > 300
    assert dangerous <= HARMLESS
    assert {name.rpartition(".")[0] for name in functions} == {
        "gradpolicy.rules.derivative",
        "gradpolicy.rules.registry",
        "torch.nn.functional",
    }


def constructors(kind: type) -> Iterator[str]:
    for base in kind.__mro__[:-1]:
        for name in ("__new__", "__init__", "__post_init__"):
            if name in vars(base):
                try:
                    yield inspect.getsource(vars(base)[name])
                except (TypeError, OSError):
                    continue  # made by a decorator or written in C
