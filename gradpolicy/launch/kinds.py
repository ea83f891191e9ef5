"""What a config may build: one kind of class under some keys, several as arguments, and a few functions.

This is the whole list. A `_target_` is compared with it by identity, in :mod:`gradpolicy.launch.targets`; all
names here are those of the objects themselves, and none is loaded before a config names something of its
package.
"""

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
    "gradpolicy.policies.Policy",
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

# The functions, each with the arguments that a config may not give it.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "gradpolicy.get_rule": (),
    "gradpolicy.gradient_of": (),
    "timm.create_model": ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"),
    **{
        f"torch.nn.functional.{loss}": ()
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
    },
}

# These methods make Hugging Face's models and configs too. They are told not to run a repository's code.
HUGGING_FACE = "transformers"
HUGGING_FACE_METHODS = ("from_pretrained", "from_config")
HUGGING_FACE_CLASSES = (
    "transformers.AutoConfig",
    "transformers.PreTrainedModel",
    "transformers.PretrainedConfig",
    "transformers.models.auto.auto_factory._BaseAutoModelClass",
)
# Each of these can load code or a pickle.
HUGGING_FACE_REFUSED = (
    "adapter_kwargs",
    "allow_all_kernels",
    "attn_implementation",
    "code_revision",
    "custom_generate",
    "experts_implementation",
    "kernel_config",
    "trust_remote_code",
    "use_kernels",
    "weights_only",
)
# ... but for these values.
HUGGING_FACE_HARMLESS = (
    None,
    False,
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "sdpa",
)
