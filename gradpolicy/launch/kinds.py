"""The classes and functions that a config may build.

This is the whole list. A `_target_` is compared with it by identity, in :mod:`gradpolicy.launch.targets`; all
names here are those of the objects themselves, and none is loaded before a config names something of its
package.
"""

from typing import Any

# The one kind that a key takes, and an example of it. A star stands for one name.
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

# The kinds that any other key takes. Making one of these runs nothing and deletes nothing.
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
    # Models and their parts, LightningModules and metrics among them.
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

# These methods make Hugging Face's models and configs too, without a repository's code.
HUGGING_FACE = "transformers"
HUGGING_FACE_METHODS = ("from_pretrained", "from_config")
HUGGING_FACE_CLASSES = (
    "transformers.AutoConfig",
    "transformers.PreTrainedModel",
    "transformers.PretrainedConfig",
    "transformers.models.auto.auto_factory._BaseAutoModelClass",
)

# Packages whose functions hand unnamed arguments on: a config gives them one such argument at most.
HANDING_ON = (HUGGING_FACE, "timm")

_ATTENTION = (None, "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
# Arguments by which a class or function that is allowed loads what is not, a pickle or code; each with the
# values that a config may give it. They are searched for at any depth of a node's arguments, since many
# classes hand mappings on, such as `model_args` and `text_config`.
LOADING_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adapter_kwargs": (None,),
    "allow_all_kernels": (None, False),
    "attn_implementation": _ATTENTION,
    # Gives any of these another name.
    "attribute_map": (None,),
    "auto_map": (None,),
    "checkpoint_path": (None,),
    "code_revision": (None,),
    "custom_generate": (None,),
    "experts_implementation": _ATTENTION,
    "feature_extractor_weights_path": (None,),
    "kernel_config": (None,),
    # torchmetrics runs the code of a repository whose name has "jinaai" in it, and asks about that of others.
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
