"""Trains a small perceptron with 4-bit weights and activations by each rule, and prints a table.

python scripts/compare_quantisation.py                           the digits, which come with scikit-learn
python scripts/compare_quantisation.py --fashion DIRECTORY       Fashion-MNIST, from its four files
python scripts/compare_quantisation.py --methods lsq torchao       only these

The row torchao needs torchao (`pip install torchao`), and is omitted without it.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gradpolicy as gp
from gradpolicy.tasks import quantizers
from gradpolicy.tasks.digits import DigitsDataModule
from gradpolicy.tasks.fashion_mnist import FashionMNISTDataModule
from gradpolicy.tasks.models import MultilayerPerceptron, QuantizedReLU
from gradpolicy.tasks.quantizers import LSQ, PACT, DoReFaWeight, LSQPlus, Quantized

BITS, SEEDS = 4, (0, 1, 2)
WEIGHTS, ACTIVATIONS = "*.parametrizations.*", ["*", "!*.parametrizations.*"]
Made = tuple[nn.Module, list]
# The last layer is not quantised, as in the papers.
quantized = partial(Quantized, keep=["head"])


def full_precision(model: nn.Module) -> Made:
    """Nothing is quantised."""
    return model, []


def no_policy(model: nn.Module) -> Made:
    """LSQ's layers with their ordinary gradient."""
    return quantized(model, partial(LSQ, BITS), partial(LSQ, BITS, signed=False)), []


def dorefa(model: nn.Module) -> Made:
    """DoReFa's weights and activations."""
    activations = partial(QuantizedReLU, 2**BITS - 1)
    return quantized(model, partial(DoReFaWeight, BITS), activations), [gp.StraightThrough(ops=["round"])]


def pact(model: nn.Module) -> Made:
    """DoReFa's weights, and activations with a learned clip."""
    policies = [
        gp.StraightThrough(ops=["round"], modules=WEIGHTS),
        gp.UseRule("pact", ops=[quantizers.clip_and_quantize]),
    ]
    return quantized(model, partial(DoReFaWeight, BITS), partial(PACT, BITS)), policies


def on_weights() -> gp.UseRule:
    """LSQ's rule on the weights."""
    return gp.UseRule("lsq", parameters={"bits": BITS}, ops=[quantizers.quantize], modules=WEIGHTS)


def lsq(model: nn.Module) -> Made:
    """Learned steps."""
    unsigned = {"bits": BITS, "signed": False}
    on_activations = gp.UseRule("lsq", parameters=unsigned, ops=[quantizers.quantize], modules=ACTIVATIONS)
    return no_policy(model)[0], [on_weights(), on_activations]


def lsq_plus(model: nn.Module) -> Made:
    """Learned steps, and offsets of the activations."""
    on_activations = gp.UseRule(
        "lsq_plus", parameters={"bits": BITS}, ops=[quantizers.quantize], modules=ACTIVATIONS
    )
    return quantized(model, partial(LSQ, BITS), partial(LSQPlus, BITS)), [on_weights(), on_activations]


def torchao(model: nn.Module) -> Made:
    """Fake quantisation of torchao: a step per row of weights and per input sample, computed at each call."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    bits = getattr(torch, f"int{BITS}")
    weights = IntxFakeQuantizeConfig(bits, "per_channel", is_symmetric=True)
    inputs = IntxFakeQuantizeConfig(bits, "per_token", is_symmetric=False)
    config = QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
    quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and name != "head")
    return model, []


METHODS: dict[str, Callable[[nn.Module], Made]] = {
    method.__name__: method for method in (full_precision, no_policy, dorefa, pact, lsq, lsq_plus, torchao)
}


def accuracy(method: str, seed: int, fashion: Path | None) -> float:
    """Train once, and return the test accuracy."""
    torch.manual_seed(seed)
    if fashion is None:
        data: DigitsDataModule | FashionMNISTDataModule = DigitsDataModule(batch_size=64, seed=seed)
        sizes, epochs = (64, [64, 32]), 20
    else:
        data = FashionMNISTDataModule(fashion, batch_size=256, seed=seed)
        sizes, epochs = (784, [128, 64]), 3
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    model, policies = METHODS[method](MultilayerPerceptron(*sizes, classes=10, normalize=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    with gp.install(model, policies):
        for _ in range(epochs):
            for images, labels in data.train_dataloader():
                optimizer.zero_grad()
                functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in data.test_dataloader()]
    return float(torch.cat(right).mean())


def main() -> None:
    """Print a row per method: mean and sample standard deviation over the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fashion", type=Path, metavar="DIRECTORY")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    print("| method | test accuracy, % |\n| --- | ---: |")
    for method in arguments.methods:
        if method == "torchao" and find_spec("torchao") is None:
            continue
        found = [100 * accuracy(method, seed, arguments.fashion) for seed in SEEDS]
        print(f"| {method} | {statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} |", flush=True)


if __name__ == "__main__":
    main()
