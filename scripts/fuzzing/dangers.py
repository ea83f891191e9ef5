"""What no config may run: names with arguments that leave a trace, and the files that they use."""

import io
import os
import pickle
import random
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator
from functools import cache
from typing import Any

from gradpolicy.errors import PolicyError
from gradpolicy.imports import KNOWN, lies_in, limited_to
from gradpolicy.launch.kinds import LOADING_ARGUMENTS
from gradpolicy.launch.target_arguments import argument_names
from gradpolicy.launch.targets import locate_target

# Whoever runs something writes this file, starts a program or removes what is guarded.
CANARY = "canary"
SHELL = f"touch {CANARY}"
PYTHON = f"open('{CANARY}', 'w').close()"
URL = "http://127.0.0.1:9/nothing"


class RunsWhenRead:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (SHELL,)


class WritesWhenRead:
    """Runs code when it is unpickled, by a name that torch itself has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (PYTHON,)


def evil_pickle() -> bytes:
    """A pickle that runs code when it is read."""
    return pickle.dumps({"state_dict": {}, "more": [RunsWhenRead(), WritesWhenRead()]}, protocol=2)


def _zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


FILES = {
    "guarded/keep.txt": b"mine\n",
    "evil.pkl": evil_pickle(),
    "evil.zip": _zipped("evil/data.pkl", evil_pickle()),
    # A module that leaves the trace when it is imported, and what torch.hub looks for.
    "stranger.py": f"{PYTHON}\n\n\ndef rule(grad, inputs, output):\n    return grad\n".encode(),
    "hubconf.py": f"{PYTHON}\n\n\ndef model():\n    return None\n".encode(),
}

_NODE = {"_target_": "os.system", "command": SHELL}
_AGAIN = ["hydra.run.dir=again", "policy=none", "plan_only=true"]

TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("os.system", {"command": SHELL}),
    ("os.popen", {"cmd": SHELL}),
    ("posix.system", {"_args_": [SHELL]}),
    ("os.remove", {"path": "guarded/keep.txt"}),
    ("os.makedirs", {"name": CANARY}),
    ("subprocess.Popen", {"args": ["touch", CANARY]}),
    ("subprocess.getoutput", {"cmd": SHELL}),
    ("builtins.exec", {"_args_": [PYTHON]}),
    ("builtins.eval", {"_args_": [PYTHON]}),
    ("builtins.open", {"file": CANARY, "mode": "w"}),
    ("builtins.__import__", {"name": "stranger"}),
    ("importlib.import_module", {"name": "stranger"}),
    ("shutil.rmtree", {"path": "guarded"}),
    ("shutil.move", {"src": "guarded", "dst": CANARY}),
    ("pathlib.Path.unlink", {"_args_": ["guarded/keep.txt"]}),
    ("runpy.run_path", {"path_name": "stranger.py"}),
    ("runpy.run_module", {"mod_name": "stranger"}),
    ("stranger.rule", {}),
    ("numpy.load", {"file": "evil.pkl", "allow_pickle": True}),
    ("numpy.savetxt", {"fname": CANARY, "X": [1.0]}),
    ("joblib.load", {"filename": "evil.pkl"}),
    ("yaml.unsafe_load", {"stream": f"!!python/object/apply:os.system ['{SHELL}']"}),
    ("hydra.utils.instantiate", {"config": _NODE}),
    ("hydra.utils.call", {"_args_": [_NODE]}),
    ("hydra.utils.get_method", {"path": "os.system"}),
    ("hydra._internal.instantiate._instantiate2.instantiate", {"config": _NODE}),
    ("omegaconf.OmegaConf.save", {"config": {}, "f": CANARY}),
    ("torch.load", {"f": "evil.pkl", "weights_only": False}),
    ("torch.serialization.load", {"f": "evil.pkl", "weights_only": False}),
    ("torch.save", {"obj": {}, "f": CANARY}),
    ("torch.hub.load", {"repo_or_dir": ".", "model": "model", "source": "local"}),
    ("torch.hub.load_state_dict_from_url", {"url": URL}),
    ("torch.hub.download_url_to_file", {"url": URL, "dst": CANARY}),
    ("torch.utils.model_zoo.load_url", {"url": URL}),
    ("torch.jit.load", {"f": "evil.zip"}),
    ("torch.jit.unsupported_tensor_ops.execWrapper", {"code": PYTHON, "glob": {}, "loc": {}}),
    ("torch.jit._check.os.system", {"command": SHELL}),
    ("torch.package.PackageImporter", {"file_or_buffer": "evil.zip"}),
    ("torch.ops.load_library", {"path": "evil.so"}),
    ("torch.classes.load_library", {"path": "evil.so"}),
    ("torch.functional.torch.ops.load_library", {"path": "evil.so"}),
    ("torch.functional.torch.load", {"f": "evil.pkl", "weights_only": False}),
    ("torch.nn.functional.torch.hub.load", {"repo_or_dir": ".", "model": "model", "source": "local"}),
    ("torch.optim.optimizer.torch.save", {"obj": {}, "f": CANARY}),
    ("torch.utils.cpp_extension.load_inline", {"name": "evil", "cpp_sources": [""]}),
    ("torch.utils.data.datapipes.utils.decoder.basichandlers", {"extension": "pkl", "data": "x"}),
    ("torch.utils.data.datapipes.utils.decoder.Decoder", {"handlers": []}),
    ("torch.utils.data.datapipes.iter.FileOpener", {"datapipe": [CANARY], "mode": "w"}),
    ("torch.utils.collect_env.run", {"command": SHELL}),
    ("torch.utils.collect_env.get_pretty_env_info", {}),
    ("torch.utils._cpp_extension_versioner.open", {"file": CANARY, "mode": "w"}),
    ("torch.distributed.run.main", {"args": ["stranger.py"]}),
    (
        "torch.distributed.launcher.api.launch_agent",
        {"config": None, "entrypoint": "touch", "args": [CANARY]},
    ),
    ("torch.distributed.elastic.multiprocessing.start_processes", {"name": "x", "entrypoint": "touch"}),
    ("torch.distributed.checkpoint.format_utils.dcp_to_torch_save", {"_args_": ["guarded", CANARY]}),
    ("torch.distributed.checkpoint.FileSystemReader.read_metadata", {"_args_": [None]}),
    ("torch.multiprocessing.spawn", {"fn": None}),
    ("torch.onnx.export", {"model": None, "f": CANARY}),
    ("torch.monitor.TensorboardEventHandler", {"writer": None}),
    ("torch.profiler.tensorboard_trace_handler", {"dir_name": CANARY}),
    ("torch.cuda.memory._dump_snapshot", {"filename": CANARY}),
    ("torch.utils.tensorboard.SummaryWriter", {"log_dir": CANARY}),
    ("torch.compiler.load_cache_artifacts", {"serialized_artifacts": "x"}),
    ("torch.fx.graph_module._forward_from_src", {"src": PYTHON, "globals": {}}),
    ("torch.export.load", {"f": "evil.zip"}),
    ("lightning.pytorch.cli.LightningCLI", {"args": []}),
    ("lightning.fabric.utilities.cloud_io._load", {"path_or_url": "evil.pkl", "weights_only": False}),
    ("lightning.pytorch.plugins.io.TorchCheckpointIO.remove_checkpoint", {"_args_": [None, "guarded"]}),
    ("lightning.fabric.plugins.TorchCheckpointIO.save_checkpoint", {"_args_": [None, {}, CANARY]}),
    ("lightning.pytorch.LightningModule.load_from_checkpoint", {"checkpoint_path": "evil.pkl"}),
    ("lightning.pytorch.core.saving.save_hparams_to_yaml", {"config_yaml": CANARY, "hparams": {}}),
    ("lightning.pytorch.loggers.csv_logs.os.remove", {"path": "guarded/keep.txt"}),
    ("lightning.pytorch.utilities.deepspeed.os.system", {"command": SHELL}),
    ("lightning.fabric.utilities.consolidate_checkpoint._process_cli_args", {"args": None}),
    ("torchmetrics.functional.text.bert.os.system", {"command": SHELL}),
    ("torchmetrics.utilities.plot.plot_single_or_multi_val", {"val": 1.0}),
    ("transformers.AutoModel.from_pretrained", {"_args_": ["stranger"], "trust_remote_code": True}),
    ("transformers.pipeline", {"model": "stranger", "trust_remote_code": True}),
    ("transformers.TimmWrapperConfig", {"model_args": {"checkpoint_path": "evil.pkl"}}),
    ("transformers.TimmBackbone", {"config": {}, "checkpoint_path": "evil.pkl"}),
    ("timm.create_model", {"model_name": f"local-dir:{CANARY}"}),
    ("gradpolicy.launch.app.main", {"config_dir": ".", "arguments": _AGAIN}),
    ("gradpolicy.launch.app.shutil.rmtree", {"path": "guarded"}),
    ("gradpolicy.launch.targets.build", {"node": _NODE, "key": "x"}),
    ("gradpolicy.launch.app.hydra.utils.instantiate", {"config": _NODE}),
    ("gradpolicy.launch.targets.locate_target", {"key": "x", "path": "os.system", "packages": ["os"]}),
    ("gradpolicy.imports.importlib.import_module", {"name": "stranger"}),
    ("gradpolicy.launch.run.save_config", {"container": {}, "directory": CANARY}),
    ("gradpolicy.lightning.checkpoint_io.WholeCheckpointIO.remove_checkpoint", {"_args_": [None, "guarded"]}),
    ("gradpolicy.distributed.sharded_checkpoint.remove_whole", {"_args_": ["guarded"]}),
    ("gradpolicy.rules.registry.importlib.import_module", {"name": "stranger"}),
    ("gradpolicy.where.importlib.import_module", {"name": "stranger"}),
    ("hydra.experimental.callbacks.PickleJobInfoCallback", {}),
)
# Names of functions and modules for arguments that name something by itself: rules, surrogates, modules.
NAMES = (
    "stranger.rule",
    "stranger.Nothing",
    "os.system",
    "builtins.exec",
    "torch.load",
    "torch.hub.load",
    "antigravity",
)


def target(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A node that no config may build, with the name by which it goes."""
    name, arguments = draw.choice(TARGETS)
    return name, {"_target_": name, **arguments}


def loading_node(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A node that a config may build, but for what one of its arguments holds at some depth, and its name."""
    name, arguments = draw.choice(_allowed())
    loader = draw.choice(tuple(LOADING_ARGUMENTS))
    value: Any = {
        loader: draw.choice(("evil.pkl", "./stranger", {"AutoModel": "stranger--stranger.Nothing"}))
    }
    for _ in range(draw.randrange(3)):
        value = draw.choice(([value], {"deep": value}))
    return name, {"_target_": name, draw.choice(arguments): value}


@cache
def _allowed() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The callables that a config may build, as far as imported, each with its arguments."""
    found = {}
    with limited_to(()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(_walk(KNOWN, type(None)))):
            try:
                names, takes_any = argument_names(locate_target("x", {"_target_": name}))
            except PolicyError:
                continue
            found[name] = (*names, *(["anything"] if takes_any else []))
    return tuple((name, arguments) for name, arguments in found.items() if arguments)


@cache
def walked(kind: type) -> tuple[str, ...]:
    """The public callables of the allowed packages that are no classes of a kind, as far as imported."""
    with warnings.catch_warnings():
        # Some of torch's names warn when they are only looked at.
        warnings.simplefilter("ignore")
        return tuple(sorted(set(_walk(("gradpolicy", "torch", "lightning", "torchmetrics"), kind))))


def _walk(packages: tuple[str, ...], kind: type) -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        public = not any(part.startswith("_") for part in name.split("."))
        if not (lies_in(name, packages) and public and isinstance(module, types.ModuleType)):
            continue
        for attribute, found in sorted(vars(module).items()):
            other = not (isinstance(found, type) and issubclass(found, kind))
            if not attribute.startswith("_") and callable(found) and other:
                yield f"{name}.{attribute}"
