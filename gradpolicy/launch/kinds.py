"""The classes and functions that a config may build.

This is the whole list. :mod:`gradpolicy.launch.targets` compares a `_target_` with it by identity. The names
are those of the objects themselves; a package is loaded only if a config names something in it.
"""

from typing import Any

# The single kind that a key takes, and an example. A star matches one name.
KIND_AT: dict[str, tuple[str, str]] = {
    "callbacks.*": ("lightning.pytorch.Callback", "lightning.pytorch.callbacks.ModelCheckpoint"),
    "data": ("lightning.pytorch.LightningDataModule", "gradpolicy.tasks.DigitsDataModule"),
    "logger.*": ("lightning.pytorch.loggers.Logger", "lightning.pytorch.loggers.CSVLogger"),
    "model": ("lightning.pytorch.LightningModule", "gradpolicy.tasks.Classifier"),
    "optimizer": ("torch.optim.Optimizer", "torch.optim.AdamW"),
    "policy.*": ("gradpolicy.policies.Policy", "gradpolicy.Freeze"),
    "policy.*.mask": ("gradpolicy.masks.MaskSource", "gradpolicy.masks.Random"),
    "policy.*.when": ("gradpolicy.When", "gradpolicy.When"),
    "trainer": ("lightning.pytorch.Trainer", "lightning.pytorch.Trainer"),
    "trainer.profiler": (
        "lightning.pytorch.profilers.Profiler",
        "lightning.pytorch.profilers.SimpleProfiler",
    ),
    "trainer.strategy": (
        "lightning.pytorch.strategies.Strategy",
        "lightning.pytorch.strategies.DDPStrategy",
    ),
}

# The kinds that any other key takes. Building them runs no other code and deletes nothing.
ARGUMENT_KINDS: tuple[str, ...] = (
    "gradpolicy.When",
    "gradpolicy.distributed.compression.ActiveEntries",
    "gradpolicy.masks.MaskSource",
    "gradpolicy.masks.RandomMask",
    "gradpolicy.masks.scores.Score",
    "gradpolicy.policies.Policy",
    "gradpolicy.rates.LayerDecay",
    "gradpolicy.schedules.Schedule",
    "lightning.fabric.plugins.CheckpointIO",
    "lightning.fabric.plugins.ClusterEnvironment",
    "lightning.fabric.plugins.Precision",
    "lightning.pytorch.Callback",
    "lightning.pytorch.LightningDataModule",
    "lightning.pytorch.callbacks.progress.rich_progress.RichProgressBarTheme",
    "lightning.pytorch.loggers.Logger",
    "lightning.pytorch.plugins.LayerSync",
    "lightning.pytorch.profilers.Profiler",
    "lightning.pytorch.strategies.Strategy",
    # Models and their parts, including LightningModules and metrics.
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "transformers.PretrainedConfig",
)

# The functions.
FUNCTIONS: tuple[str, ...] = (
    "gradpolicy.get_rule",
    "gradpolicy.gradient_of",
    "timm.create_model",
    *(
        f"torch.nn.functional.{loss}"
        for loss in (
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "cross_entropy",
            "huber_loss",
            "kl_div",
            "l1_loss",
            "mse_loss",
            "nll_loss",
            "smooth_l1_loss",
        )
    ),
)

# Methods that build Hugging Face's models and configs, without code from a repository.
HUGGING_FACE = "transformers"
HUGGING_FACE_METHODS = ("from_pretrained", "from_config")
HUGGING_FACE_CLASSES = (
    "transformers.AutoConfig",
    "transformers.PreTrainedModel",
    "transformers.PretrainedConfig",
    "transformers.models.auto.auto_factory._BaseAutoModelClass",
)

# Packages whose functions pass positional arguments on: a config may give them one such argument.
HANDING_ON = (HUGGING_FACE, "timm")

_ATTENTION = (None, "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
# Arguments by which a class or function that is allowed loads what is not, a pickle or code; each with the
# values that a config may give it. They are searched for at any depth of a node's arguments, since many
# classes hand mappings on, such as `model_args` and `text_config`.
LOADING_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adapter_kwargs": (None,),
    "allow_all_kernels": (None, False),
    "attn_implementation": _ATTENTION,
    # Aliases of these.
    "attribute_map": (None,),
    "auto_map": (None,),
    "checkpoint_path": (None,),
    "code_revision": (None,),
    "custom_generate": (None,),
    "experts_implementation": _ATTENTION,
    "feature_extractor_weights_path": (None,),
    "kernel_config": (None,),
    # torchmetrics runs code of repositories with "jinaai" in their names, and asks about the code of others.
    "model_name_or_path": (
        None,
        "clip_iqa",
        "openai/clip-vit-base-patch16",
        "openai/clip-vit-base-patch32",
        "openai/clip-vit-large-patch14",
        "openai/clip-vit-large-patch14-336",
    ),
    "pretrained_cfg": (None,),
    "pretrained_cfg_overlay": (None,),
    "trust_remote_code": (None, False),
    "use_kernels": (None, False),
    "weights_only": (True,),
}
