"""Records what the code that authors published does on fixed inputs, for tests/masks/test_published_code.py.

    python tests/masks/recorded/record.py child_tuning=DIR fish=DIR freezeout=DIR badam=DIR lisa=DIR \\
        autofreeze=DIR sparse_evolution=DIR lottery_ticket=DIR ulmfit=DIR

Each DIR is a git checkout, whose code runs as it is; packages that it imports and that matter to nothing here
are stood in for. What comes out lies beside this file, with the repository's commit in its metadata.
"""

import importlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_matrix
from torch import Tensor, nn

HERE = Path(__file__).parent
REPOSITORIES = {
    "child_tuning": "https://github.com/RunxinXu/ChildTuning",
    "fish": "https://github.com/varunnair18/FISH",
    "freezeout": "https://github.com/ajbrock/FreezeOut",
    "badam": "https://github.com/Ledzy/BAdam",
    "lisa": "https://github.com/OptimalScale/LMFlow",
    "autofreeze": "https://github.com/YuhanLiu11/AutoFreeze",
    "sparse_evolution": "https://github.com/dcmocanu/sparse-evolutionary-artificial-neural-networks",
    "lottery_ticket": "https://github.com/cambridgeltl/composable-sft",
    "ulmfit": "https://github.com/fastai/fastai1",
}


class Given(nn.Module):
    """A model whose gradients are what it is called with, a tensor for each parameter."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.own: dict[str, nn.Parameter] = {}
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            self.own[name] = nn.Parameter(torch.randn(shape))
            module.register_parameter(last, self.own[name])

    def forward(self, **gradients: Tensor) -> dict[str, Tensor]:
        losses = [(self.own[name] * gradient).sum() for name, gradient in gradients.items()]
        return {"loss": torch.stack(losses).sum()}

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.own.items()}


class StandIn(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def stand_in(*names: str, **contents: object) -> None:
    """Puts modules in the place of packages."""
    for name in names:
        module = StandIn(name)
        # Torch looks for the places of the packages that it knows.
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(contents)
        sys.modules[name] = module


def short(shape: tuple[int, ...]) -> Tensor:
    """Normal values with eight binary places: their squares can be summed without rounding."""
    return (torch.randn(shape) * 256).round() / 256


def child_tuning() -> dict[str, Tensor]:
    """Child-Tuning_D's choice and steps, Child-Tuning_F's draws and steps."""
    parts = ("utils", "utils.logging", "file_utils", "optimization", "modeling_utils", "integrations")
    more = ("deepspeed", "trainer_callback", "trainer_utils")
    stand_in("transformers", *(f"transformers.{part}" for part in (*parts, *more)))
    off = {"is_sagemaker_dp_enabled": lambda: False, "is_apex_available": lambda: False}
    sys.modules["transformers.file_utils"].__dict__.update(off, is_torch_tpu_available=lambda: False)
    sys.modules["transformers.integrations"].__dict__["is_fairscale_available"] = lambda: False
    sys.modules["transformers.utils"].__dict__["logging"] = SimpleNamespace(get_logger=lambda name: None)
    theirs = importlib.import_module("ChildTuningD")
    model = Given(
        {"layer.0.weight": (12, 10), "layer.0.bias": (10,), "layer.1.weight": (6, 12), "head": (3, 6)}
    )
    batches = [{name: short(tuple(p.shape)) for name, p in model.own.items()} for _ in range(8)]
    result = {f"weight/{name}": value for name, value in model.values().items()}
    for number, batch in enumerate(batches):
        result |= {f"gradient/{number}/{name}": gradient for name, gradient in batch.items()}
    for bound in (math.inf, 1.0):
        trainer = theirs.ChildTuningDtrainer.__new__(theirs.ChildTuningDtrainer)
        trainer.model, trainer.reserve_p = model, 0.3
        trainer.train_dataset, trainer._prepare_inputs = batches, lambda inputs: inputs
        trainer.data_collator = lambda items: {"idx": 0, **items[0]}
        loading = {"dataloader_drop_last": False, "dataloader_num_workers": 0, "dataloader_pin_memory": False}
        trainer.args = SimpleNamespace(per_device_train_batch_size=1, max_grad_norm=bound, **loading)
        chosen = trainer.calculate_fisher()
        result |= {
            f"mask/{bound}/{name}": chosen[parameter]
            for name, parameter in model.own.items()
            if parameter in chosen
        }
        if bound == math.inf:
            steps = _child_tuning_steps(theirs, model, batches, "ChildTuning-D", 1.0, chosen)
            result |= {f"D/{key}": value for key, value in steps.items()}
    steps = _child_tuning_steps(theirs, model, batches, "ChildTuning-F", 0.3, None)
    return result | {f"F/{key}": value for key, value in steps.items()}


def _child_tuning_steps(
    theirs: ModuleType,
    model: Given,
    batches: list[dict[str, Tensor]],
    mode: str,
    share: float,
    chosen: object,
) -> dict[str, Tensor]:
    """Weights and masked gradients after each step from the first weights; these are put back."""
    first = model.values()
    optimizer = theirs.ChildTuningAdamW(model.parameters(), lr=0.01, eps=1e-12, reserve_p=share, mode=mode)
    optimizer.set_gradient_mask(chosen)
    result = {}
    for number, batch in enumerate(batches):
        model(**batch)["loss"].backward()
        optimizer.step()
        for name, parameter in model.own.items():
            result[f"weight/{number}/{name}"] = parameter.detach().clone()
            result[f"gradient/{number}/{name}"] = parameter.grad.clone()
        optimizer.zero_grad()
    for name, parameter in model.own.items():
        parameter.data.copy_(first[name])
    return result


def fish() -> dict[str, Tensor]:
    """The FISH mask of the labels' gradients, sample by sample."""

    class Loader:
        def __init__(self, dataset: list, **options: object) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator:
            return iter(self.dataset)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(9, 16), nn.Linear(16, 4)

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"logits": self.fc(torch.tanh(self.body(inputs["input"])))}

    stand_in("su_torch_backend", DataLoader=Loader)
    theirs = importlib.import_module("fisher")
    model = Classifier().double()
    inputs, targets = torch.randn(12, 9, dtype=torch.float64), torch.arange(12) % 4
    samples = [{"input": x[None], "target": y[None]} for x, y in zip(inputs, targets, strict=True)]
    result = {f"weight/{name}": value.detach().clone() for name, value in model.named_parameters()}
    for ratio in (0.4, 0.7):
        method = theirs.FisherMask(model, samples, 10, ratio, "label", "square")
        method.calculate_mask()
        # The classifier's masks come last there, as its parameters do.
        for (name, _), mask in zip(model.named_parameters(), method.mask, strict=True):
            result[f"mask/{ratio}/{name}"] = mask.bool()
    return result | {"inputs": inputs, "targets": targets}


def freezeout() -> dict[str, Tensor]:
    """The layers' learning rates at every fiftieth of the iterations, 0 where a layer is switched off."""
    stand_in("path", "torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.models")
    for part in ("datasets", "transforms", "models"):
        setattr(sys.modules["torchvision"], part, sys.modules[f"torchvision.{part}"])
    theirs = importlib.import_module("densenet")
    result = {}
    for curve in ("linear", "squared", "cubic"):
        for scale in (True, False):
            network = theirs.DenseNet(
                4, depth=10, nClasses=3, epochs=1, t_0=0.6, scale_lr=scale, how_scale=curve
            )
            course = []
            for iteration in range(1000):
                network.update_lr()
                if iteration % 50 == 0:
                    rates = {group["layer_index"]: group["lr"] for group in network.optim.param_groups}
                    course.append([rates.get(layer, 0.0) for layer in range(network.layer_index + 1)])
            result[f"{curve}/{scale}"] = torch.tensor(course, dtype=torch.float64)
    return result


def badam() -> dict[str, Tensor]:
    """Weights after each step while three blocks take turns of four steps."""
    stand_in("transformers", "transformers.trainer_callback", "transformers.trainer_utils")
    stand_in("transformers.utils", logging=SimpleNamespace(get_logger=lambda name: None))
    stand_in("transformers.pytorch_utils", ALL_LAYERNORM_LAYERS=[])
    stand_in("transformers.integrations", is_deepspeed_zero3_enabled=lambda: False)
    theirs = importlib.import_module("badam.block_optim")
    result = {}
    model = Given({f"layers.{i}.{kind}": (4, 3) for i in range(3) for kind in ("weight", "other")})
    first = model.values()
    result |= {f"weight/{name}": value for name, value in first.items()}
    gradients = [{name: torch.randn(4, 3) for name in model.own} for _ in range(20)]
    for number, batch in enumerate(gradients):
        result |= {f"gradient/{number}/{name}": gradient for name, gradient in batch.items()}
    for mode in ("ascending", "descending"):
        for name, parameter in model.own.items():
            parameter.data.copy_(first[name])
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = theirs.BlockOptimizer(
            inner,
            list(model.named_parameters()),
            block_prefix_list=[[f"layers.{i}."] for i in range(3)],
            switch_block_every=4,
            switch_mode=mode,
            verbose=0,
        )
        for number, batch in enumerate(gradients):
            model(**batch)["loss"].backward()
            optimizer.step()
            for name, value in model.values().items():
                result[f"{mode}/{number}/{name}"] = value
    return result


def lisa() -> dict[str, Tensor]:
    """Which parameters train in each of thirty steps, two of six layers at a time, ten steps each."""
    stand_in("transformers", "transformers.trainer_callback")
    theirs = importlib.import_module("lisa_trainer")
    names = ["embed.weight", *(f"layers.{i}.weight" for i in range(6)), "head.weight"]
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(4, 2),
            "layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(6)),
            "head": nn.Linear(2, 4, bias=False),
        }
    )
    np.random.seed(0)
    callback = theirs.DynamicLayerActivationCallback(2, 10, model, "model.layers")
    parameters = dict(model.named_parameters())
    course = []
    for step in range(30):
        callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
        course.append([parameters[name].requires_grad for name in names])
    return {"trains": torch.tensor(course)}


def autofreeze() -> dict[str, Tensor]:
    """From which of twelve layers each step trains, and how many models and optimizers it took."""
    stand_in("pandas", "tokenization")
    gradients = torch.stack([short((12, 2, 2)) for _ in range(28)])
    # The last interval is like the one before it: nothing changes any more.
    gradients[24:27] = gradients[21:24]
    result = {"gradients": gradients}
    for percentile in (10, 50, 75, 100):
        starts, made = _autofreeze_course(gradients, percentile)
        result |= {f"starts/{percentile}": torch.tensor(starts), f"made/{percentile}": torch.tensor(made)}
    return result


def _autofreeze_course(gradients: Tensor, percentile: int) -> tuple[list[int], list[int]]:
    """Runs their program: an example a step, intervals of three steps."""
    starts: list[int] = []
    made: list[int] = []
    models = 0

    class Classifier(nn.Module):
        def __init__(self, config: object, labels: int) -> None:
            nonlocal models
            models += 1
            super().__init__()
            self.bert = Given({f"encoder.layer.{i}.weight": (2, 2) for i in range(12)})

        def forward(self, ids: Tensor, *inputs: Tensor, start_layer: int = 0) -> tuple:
            if not self.training:
                return (torch.zeros(()), torch.zeros(len(ids), 2)), None
            # As in their encoder, the layers in front get no gradient.
            given = list(zip(self.bert.own, gradients[len(starts)], strict=True))[start_layer:]
            starts.append(start_layer)
            made.append(models)
            return (self.bert(**dict(given))["loss"], None), None

    class Task:
        def get_labels(self) -> list[int]:
            return [0, 1]

        def get_dev_examples(self, folder: str) -> list[int]:
            return [0]

        def get_train_examples(self, folder: str, data_num: None) -> list[int]:
            return [0] * len(gradients)

    def features(examples: list[int], *rest: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(input_ids=[0], input_mask=[1], segment_ids=[0], label_id=0) for _ in examples]

    tasks = ["AGNewsProcessor", "IMDBProcessor", "Yelp_p_Processor", "Yelp_f_Processor", "Yahoo_Processor"]
    tasks += ["Trec_Processor", "Dbpedia_Processor", "MrpcProcessor", "Sogou_Processor", "ColaProcessor"]
    tasks += [f"{task}{kind}" for task in tasks[:2] for kind in ("_sep", "_sep_aug")]
    stand_in("utils", convert_examples_to_features=features, **dict.fromkeys(tasks, Task))
    config = SimpleNamespace(from_json_file=lambda path: SimpleNamespace(max_position_embeddings=1))
    stand_in("modeling_auto_freeze", BertConfig=config, BertForSequenceClassification=Classifier)
    sys.modules.pop("freeze_intermediate_e2e_lr", None)
    theirs = importlib.import_module("freeze_intermediate_e2e_lr")
    named = {"task_name": "ag", "data_dir": "", "bert_config_file": "", "vocab_file": ""}
    numbers = {"max_seq_length": 1, "train_batch_size": 1, "num_train_epochs": 1, "num_intervals": 9}
    with tempfile.TemporaryDirectory() as folder:
        options = {**named, **numbers, "random_seeds": 0, "percentile": percentile, "output_dir": folder}
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        with mock.patch("sys.argv", ["", *flags, "--do_train", "--no_cuda"]):
            theirs.main()
    return starts, made


def sparse_evolution() -> dict[str, Tensor]:
    """What SET's two programs leave of three weights, and how many connections there are afterwards."""
    parts = ("preprocessing", "preprocessing.image", "models", "layers", "datasets", "utils")
    stand_in("keras", *(f"keras.{part}" for part in parts), "sparseoperations")
    stand_in("keras_contrib", "keras_contrib.layers", "keras_contrib.layers.advanced_activations")
    masked = importlib.import_module("set_mlp_keras_cifar10").SET_MLP_CIFAR10
    sparse = importlib.import_module("set_mlp_sparse_data_structures").SET_MLP
    np.random.seed(0)
    result = {}
    for number, density in enumerate((0.2, 0.4, 0.6)):
        weight = torch.randn(20, 15) * (torch.rand(20, 15) < density)
        result[f"weight/{number}"] = weight
        theirs = masked.__new__(masked)
        theirs.zeta = 0.3
        grown, kept = theirs.rewireMask(weight.numpy(), int(weight.count_nonzero()))
        result |= {f"masked/kept/{number}": kept != 0, f"masked/active/{number}": grown != 0}
        theirs = sparse.__new__(sparse)
        theirs.zeta, theirs.n_layers, theirs.dimensions = 0.3, 2, (20, 15)
        theirs.w = {1: csr_matrix(weight.numpy())}
        theirs.pdw = {1: csr_matrix(weight.numpy())}
        theirs.weightsEvolution()
        # What stays keeps its momentum, here its first value; what is new has none.
        kept, active = theirs.pdw[1].toarray() != 0, theirs.w[1].toarray() != 0
        result |= {f"sparse/kept/{number}": kept, f"sparse/active/{number}": active}
    return {key: torch.as_tensor(value) for key, value in result.items()}


def lottery_ticket() -> dict[str, Tensor]:
    """Weights after full and after sparse fine-tuning, and the entries that were chosen between them."""
    stand_in("transformers", "datasets", "huggingface_hub")
    theirs = importlib.import_module("sft.lt_sft")
    model = Given({"body.weight": (12, 10), "body.bias": (10,), "head": (4, 5)})
    gradients = [{name: short(tuple(p.shape)) for name, p in model.own.items()} for _ in range(12)]
    result = {f"weight/{name}": value for name, value in model.values().items()}
    course = []

    class Trainer:
        """Six steps of a new AdamW, the first six and then the last six gradients."""

        def __init__(self, **given: object) -> None:
            self.__dict__.update(given, optimizer=None)

        def training_step(self, batch: dict[str, Tensor]) -> None:
            self.model(**batch)["loss"].backward()

        def train(self) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.0)
            for batch in gradients[len(course) : len(course) + 6]:
                self.training_step(batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
                course.append(self.model.values())

    bounds = {"min_steps": None, "max_steps": 6, "max_epochs": None}
    lengths = {f"{kind}_ft_{key}_per_iteration": bounds[key] for kind in ("full", "sparse") for key in bounds}
    options = {"ft_params_num": None, "ft_params_proportion": 0.1, "n_ft_iterations": 1}
    options |= {"full_l1_reg": 0.0, "sparse_l1_reg": 0.0}
    tuner = theirs.LotteryTicketSparseFineTuner(Trainer)(
        model=model,
        args=SimpleNamespace(get_process_log_level=lambda: 30, local_rank=0, disable_tqdm=True),
        maskable_params=["body.weight", "body.bias"],
        sft_args=SimpleNamespace(**lengths, **options),
    )
    tuner.train()
    for number, (batch, values) in enumerate(zip(gradients, course, strict=True)):
        result |= {f"gradient/{number}/{name}": gradient for name, gradient in batch.items()}
        result |= {f"after/{number}/{name}": value for name, value in values.items()}
    return result | {f"mask/{name}": mask for name, mask in tuner._mask.items()}


def ulmfit() -> dict[str, Tensor]:
    """Which of five layer groups train in each epoch of the program that fine-tunes classifiers."""
    parts = "imports torch_imports transforms model dataset sgdr layer_optimizer layers metrics swa fp16"
    stand_in("fire", "fastai.text", "fastai.lm_rnn", *(f"fastai.{part}" for part in parts.split()))
    stand_in("fastai.lsuv_initializer", apply_lsuv_init=None)
    sys.modules["fastai.imports"].__dict__.update(np=np, torch=torch, nn=nn, LooseVersion=str)
    sys.modules["fastai.torch_imports"].__dict__["children"] = lambda module: list(module.children())
    theirs, course = importlib.import_module("fastai.learner"), []

    class Learner(theirs.Learner):
        def __init__(self, *given: object, opt_fn: object) -> None:
            self.groups = [nn.Linear(1, 1) for _ in range(5)]
            self.load_encoder = self.save = lambda file: None
            self.sched = SimpleNamespace(plot_lr=lambda: None)

        def get_layer_groups(self) -> list[nn.Module]:
            return self.groups

        def fit(self, rates: object, cycles: int, cycle_len: int, **given: object) -> None:
            trains = [all(p.requires_grad for p in group.parameters()) for group in self.groups]
            course.extend([trains] * cycle_len)

    names = "TextDataset SortishSampler SortSampler DataLoader ModelData get_rnn_classifier TextModel to_gpu"
    given = dict.fromkeys((*names.split(), "seq2seq_reg", "accuracy"), lambda *args, **kwargs: None)
    numbers = SimpleNamespace(load=lambda path: np.array([[0], [1]]), array=np.array)
    no_gpu = SimpleNamespace(_C=None, cuda=SimpleNamespace(set_device=lambda number: None))
    given |= {"np": numbers, "torch": no_gpu, "optim": torch.optim, "partial": partial, "Path": Path}
    sys.modules["fastai.text"].__dict__.update(given, RNN_Learner=Learner)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        (Path(folder) / "models" / "bpe_fwd_lm_enc.h5").touch()
        importlib.import_module("train_clas").train_clas(folder, 0, bpe=True, cl=3)
    return {"trains": torch.tensor(course)}


FOLDERS = {
    "fish": ("cifar10-fast",),
    "badam": ("src",),
    "lisa": ("src/lmflow/pipeline/utils",),
    "sparse_evolution": ("SET-MLP-Keras-Weights-Mask", "SET-MLP-Sparse-Python-Data-Structures"),
    "lottery_ticket": ("src",),
    "ulmfit": ("old", "courses/dl2/imdb_scripts"),
}


def main() -> None:
    """Records what the checkouts on the command line do."""
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        run = ["git", "-C", folder, "rev-parse", "HEAD"]
        commit = subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
        folders = [str(Path(folder) / part) for part in FOLDERS.get(name, ("",))]
        sys.path[:0] = folders
        torch.manual_seed(0)
        recorded = {key: value.contiguous() for key, value in globals()[name]().items()}
        save_file(
            recorded,
            HERE / f"{name}.safetensors",
            metadata={"repository": REPOSITORIES[name], "commit": commit},
        )
        del sys.path[: len(folders)]


if __name__ == "__main__":
    main()
