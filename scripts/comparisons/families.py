"""Which experiments are compared with each other, and by what."""

from dataclasses import dataclass

BASE = "{base}"
INITIAL_WEIGHTS = f"callbacks.initial_weights.path='{BASE}/checkpoints/best.ckpt'"


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: With the unit.
        metric: The metric of the runs.
        factor: What its values are multiplied by.
        digits: After the point.
    """

    heading: str
    metric: str
    factor: float = 1.0
    digits: int = 1


@dataclass(frozen=True)
class Variant:
    """A row of the table: what is run with each seed.

    Attributes:
        name: Names its directory.
        overrides: What it sets in the config; ``{base}`` stands for the base run's directory.
    """

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Runs that are compared.

    Attributes:
        title: What is compared.
        variants: The rows.
        columns: The columns.
        curve: The metric that the picture shows over the steps, and what to call it.
        base: What is run first with each seed, for the variants to start from.
    """

    title: str
    variants: tuple[Variant, ...]
    columns: tuple[Column, ...]
    curve: tuple[str, str]
    base: Variant | None = None


COSTS = (
    Column("step, CPU ms", "cost/step_cpu_milliseconds"),
    Column("peak optimizer state, kB", "cost/optimizer_bytes_peak", factor=1e-3, digits=0),
)
DENSITY = "policy.prune_and_grow.mask.density"
FRACTION = "policy.prune_and_grow.mask.fraction"


def _sparse(method: str, experiment: str, *overrides: str) -> tuple[Variant, ...]:
    """A method at 90 % and 98 % sparsity."""
    return tuple(
        Variant(f"{method}_{sparsity}", (f"experiment={experiment}", f"{DENSITY}={density}", *overrides))
        for sparsity, density in ((90, 0.1), (98, 0.02))
    )


def _tuned(method: str) -> Variant:
    return Variant(method, (f"experiment=shakespeare_{method}", INITIAL_WEIGHTS))


def _surrogates(experiment: str, policy: str, *names: str) -> tuple[Variant, ...]:
    """A row for each surrogate gradient."""
    return tuple(
        Variant(name, (f"experiment={experiment}", f"policy.{policy}.surrogate={name}")) for name in names
    )


def _views(title: str, experiment: str) -> Family:
    """A network that learns from two views, with and without the stop that keeps it from collapsing."""
    return Family(
        title=title,
        variants=(
            Variant("policy", (f"experiment={experiment}",)),
            Variant("no_stop", (f"experiment={experiment}", "~policy.target")),
        ),
        columns=(
            Column("probe accuracy, %", "test/probe_accuracy", factor=100.0),
            Column("spread", "test/spread", digits=2),
        ),
        curve=("val/spread", "spread of the projections"),
    )


ACCURACY = Column("test accuracy, %", "test/accuracy", factor=100.0)

FAMILIES = {
    "attention": Family(
        title="Visual attention on Fashion-MNIST: hard masks with and without a gradient, soft ones",
        variants=(
            Variant("hard_policy", ("experiment=visual_attention",)),
            Variant("hard_plain", ("experiment=visual_attention", "~policy.mask")),
            # As many places as the attention that learns comes to see.
            Variant("hard_plain_13", ("experiment=visual_attention", "~policy.mask", "model.share=0.133")),
            Variant("soft", ("experiment=visual_attention", "model.model.sampled=false", "~policy.mask")),
        ),
        columns=(ACCURACY, Column("test loss, nats", "test/loss", digits=3)),
        curve=("val/accuracy", "validation accuracy"),
    ),
    "spiking": Family(
        title="Spiking neurons on the digits: surrogate gradients of a spike",
        variants=(
            Variant("no_policy", ("experiment=spiking", "policy=none")),
            *_surrogates("spiking", "spikes", "identity", "fast_sigmoid", "arctan", "triangular"),
        ),
        columns=(ACCURACY,),
        curve=("val/accuracy", "validation accuracy"),
    ),
    "binary": Family(
        title="Binary weights and activations on the digits: surrogate gradients of the sign",
        variants=(
            Variant("no_policy", ("experiment=binary", "policy=none")),
            *_surrogates("binary", "signs", "identity", "hardtanh", "approx_sign", "swish_sign"),
        ),
        columns=(ACCURACY,),
        curve=("val/accuracy", "validation accuracy"),
    ),
    "byol": _views("BYOL on the digits, with and without a stop at the copy", "byol"),
    "simsiam": _views("SimSiam on the digits, with and without a stop at the target", "simsiam"),
    "dann": Family(
        title="Digits with a mark in the source domain only: features against the domains, or blind to them",
        variants=(
            Variant("reverse", ("experiment=domain_adversarial",)),
            Variant(
                "stop",
                (
                    "experiment=domain_adversarial",
                    "policy.domain._target_=gradpolicy.Stop",
                    "~policy.domain.factor",
                ),
            ),
            Variant("no_policy", ("experiment=domain_adversarial", "policy=none")),
        ),
        columns=(
            Column("source accuracy, %", "test/source_accuracy", factor=100.0),
            Column("target accuracy, %", "test/target_accuracy", factor=100.0),
            Column("domain accuracy, %", "test/domain_accuracy", factor=100.0),
        ),
        curve=("val/target_accuracy", "target accuracy"),
    ),
    "vq_vae": Family(
        title="A VQ-VAE of the digits, with and without a gradient through the quantiser",
        variants=(
            Variant("policy", ("experiment=vq_vae",)),
            Variant(
                "rotation",
                (
                    "experiment=vq_vae",
                    "policy.codes._target_=gradpolicy.UseRule",
                    "+policy.codes.rule=rotation",
                    "+policy.codes.at=through",
                ),
            ),
            Variant("no_codes", ("experiment=vq_vae", "~policy.codes")),
        ),
        columns=(
            Column("reconstruction", "test/reconstruction", digits=4),
            Column("perplexity", "test/perplexity"),
        ),
        curve=("val/reconstruction", "reconstruction error"),
    ),
    "fashion": Family(
        title="Fashion-MNIST: dense, RigL, SET, and a random topology that stays, at 90 % and 98 % sparsity",
        variants=(
            Variant("dense", ("experiment=fashion_dense",)),
            *_sparse("rigl", "fashion_rigl"),
            *_sparse("set", "fashion_set"),
            *_sparse("static", "fashion_set", f"{FRACTION}=0.0"),
        ),
        columns=(
            Column("test accuracy, %", "test/accuracy", factor=100.0, digits=2),
            Column("test loss, nats", "test/loss", digits=3),
            *COSTS,
        ),
        curve=("val/accuracy", "validation accuracy"),
    ),
    "shakespeare": Family(
        title="Tiny Shakespeare: a transformer of the first half of the text, tuned on the second",
        base=Variant("base", ("experiment=shakespeare_base",)),
        variants=(
            Variant(
                "untuned",
                ("experiment=shakespeare_full", "train=false", f"ckpt_path='{BASE}/checkpoints/best.ckpt'"),
            ),
            *(_tuned(method) for method in ("full", "layerwise", "block_cyclic", "topk", "random")),
        ),
        columns=(Column("test loss, nats", "test/loss", digits=3), *COSTS),
        curve=("val/loss", "validation loss, nats"),
    ),
}
