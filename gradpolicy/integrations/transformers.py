"""The callback for Hugging Face's Trainer and its subclasses, such as TRL's SFTTrainer."""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from gradpolicy.errors import PolicyError
from gradpolicy.flow.locations import is_cut
from gradpolicy.optim.prepared import innermost, put_inside
from gradpolicy.train.measurements import Measured
from gradpolicy.train.training_policies import TrainingPolicies, calling, flat_parameters_refused


class GradientPoliciesCallback(TrainingPolicies, TrainerCallback):
    """Trains under gradient policies with Hugging Face's Trainer.

    The callback does the following:

    - at the start of training: flow policies are installed on the model; if there are freeze policies, the
      optimizer that accelerate has prepared is wrapped in :class:`~gradpolicy.MaskedOptimizer`;
    - before the first batch of each update: schedules are evaluated and new masks are set;
    - after the gradients are unscaled and before they are clipped: mask sources get the gradients, and those
      of frozen entries are zeroed, so that they are neither in the clipped norm nor in the logged
      ``grad_norm``; under DeepSpeed they are zeroed as they are computed;
    - when the Trainer logs: measurements of the policies are added, for all of its trackers;
    - when it saves: masks, ages and the state of mask sources are saved with the optimizer's state;
    - when training ends, or fails: everything is removed from the model and the optimizer.

    Policies are active during training. The Trainer's evaluation computes no gradients, so a policy for the
    phases ``validate``, ``test`` or ``predict`` has no effect there.

    Args:
        policies: The policies by name. Those that are None (``null`` in YAML) are left out.
        seed: The seed of mask sources without a seed of their own.
        log: Log for each policy the share of active entries, gradient norms before and after, and counts of
            matched operations, whenever the Trainer logs its loss, as ``policy/<name>/…``; under DeepSpeed
            only the share for freeze policies.
        agreement_every: With several processes, the number of updates between comparisons of the checksums of
            masks, ages and weights; None for no comparisons.
        layers: Print what trains, layer by layer, before the first update.

    Attributes:
        installed: The flow policies on the model, during training.
        freezer: The freezer, which runs the freeze policies.
        masked_optimizers: The optimizer, if freeze policies match its parameters.

    Raises:
        PolicyError: If an entry is not a policy; when training starts, if a pattern matches nothing, two
            policies contradict each other, the Trainer uses version 1 of FSDP, tensor parallelism or
            ``nn.DataParallel``, or a policy or setting does not work with DeepSpeed; after the first update,
            if an operation that a policy names never ran.

    Example:
        >>> import gradpolicy as gp
        >>> callback = GradientPoliciesCallback({"tenth": gp.Freeze(gp.masks.Random(density=0.1))})
        >>> list(callback.policies)  # then: Trainer(..., callbacks=[callback])
        ['tenth']
    """

    _trainer: Trainer | None = None
    _measures = False
    _measured: Measured | None = None
    _has_taken = False

    # ---- installing and removing

    def on_init_end(self, *_: Any, **kwargs: Any) -> None:
        """Check that the Trainer's settings are supported, before anything is prepared.

        Also make sure that policies are removed if training fails, for which there is no event.
        """
        trainer = _calling_trainer()
        _check_supported(trainer)
        train = trainer.train

        @wraps(train)
        def train_and_remove(*arguments: Any, **settings: Any) -> Any:
            try:
                return train(*arguments, **settings)
            except RuntimeError as error:
                if is_cut(error):
                    self._check_cuts()
                raise
            finally:
                self.remove()

        trainer.train = train_and_remove  # type: ignore[method-assign]
        if _loads_before_callbacks(trainer):
            self._install_when_prepared(trainer)

    def _install_when_prepared(self, trainer: Trainer) -> None:
        """Install all policies once accelerate has sharded the model, before a checkpoint is loaded.

        Of a sharded checkpoint, what the optimizer does not have then is not read.
        """
        prepare = trainer.accelerator.prepare

        @wraps(prepare)
        def prepare_and_install(*objects: Any, **settings: Any) -> Any:
            prepared = prepare(*objects, **settings)
            each = prepared if isinstance(prepared, list | tuple) else ()
            models = [one for one in each if isinstance(one, nn.Module)]
            optimizers = [one for one in each if isinstance(one, AcceleratedOptimizer)]
            if models and optimizers:
                # DeepSpeed's engine has the model inside, which FSDP2 has sharded in place.
                inside = "module" if _is_deepspeed(trainer) else "_orig_mod"
                plain = getattr(models[0], inside, models[0])
                self._install(trainer, plain, models[0], optimizers[0])
            return prepared

        trainer.accelerator.prepare = prepare_and_install

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Install all policies: the model and the optimizer are prepared, and a checkpoint is loaded."""
        trainer = _calling_trainer()
        self._evaluated: dict[str, float] = {}
        _check_supported(trainer)
        if not _loads_before_callbacks(trainer):
            assert trainer.model is not None
            self._install(trainer, trainer.model, trainer.model_wrapped, trainer.optimizer)
        elif self._trainer is not trainer:
            raise PolicyError(
                "GradientPoliciesCallback: under FSDP2 and DeepSpeed a checkpoint is loaded before callbacks "
                "are called; give it to the Trainer as callbacks=[...], not by add_callback"
            )
        for name, policy in self.policies.items():
            if "fit" not in policy.when.phases:
                self._warn(
                    f"policy.{name}: does nothing in the phases {', '.join(policy.when.phases)}, where the "
                    "Trainer takes no gradients; put it on the model with gradpolicy.install"
                )
        # Trackers must run after this callback, to get the values that it adds to the logs.
        others = [each for each in trainer.callback_handler.callbacks if each is not self]
        trainer.callback_handler.callbacks = [self, *others]

    def _install(self, trainer: Trainer, model: nn.Module, wrapped: nn.Module | None, prepared: Any) -> None:
        """Install all policies.

        Args:
            trainer: The Trainer.
            model: The model.
            wrapped: The model as the Trainer calls it.
            prepared: The optimizer as accelerate has prepared it.
        """
        self.remove()  # auto_find_batch_size starts again after running out of memory
        self._trainer = trainer
        self._install_flow(model)
        optimizer = innermost(prepared)
        # Code would be recompiled each time requires_grad changes.
        toggles = not is_compiled_module(wrapped)
        if self.optimizer_policies and _is_deepspeed(trainer):
            from gradpolicy.integrations.deepspeed import partitioned  # importing DeepSpeed takes seconds

            optimizer = partitioned(wrapped, self.policies)
            self._install_in_engine(model, optimizer, toggle_requires_grad=toggles)
        elif self.optimizer_policies:
            (optimizer,) = self._install_freeze(model, [optimizer], toggle_requires_grad=toggles)
            put_inside(prepared, optimizer)
        self._check_installed(model, [optimizer])
        self._join_ranks(model, getattr(wrapped, "_orig_mod", wrapped))
        if not _is_deepspeed(trainer):
            self._observe_before_clipping(trainer)

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Remove everything from the model and the optimizer."""
        if self.freezer is not None:
            self.freezer.finish()
        self._remove(quiet=False)

    def remove(self) -> None:
        """Remove everything from the model and the optimizer.

        This is needed only for a callback of ``trainer.add_callback``, after training has failed.
        """
        self._remove()

    def _remove(self, *, quiet: bool = True) -> None:
        super()._remove(quiet=quiet)
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        vars(trainer.accelerator).pop("unscale_gradients", None)
        for optimizer in self.masked_optimizers:
            # Restore moments that "drop" has removed, since the plain optimizer needs them.
            optimizer.set_masks({p: None for group in optimizer.param_groups for p in group["params"]})
            if innermost(trainer.optimizer) is optimizer:
                put_inside(trainer.optimizer, optimizer.inner)

    # ---- training

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the policies before the first batch of each update."""
        assert self._trainer is not None
        self._has_taken = False
        self._begin_update(self.updates(state), int(state.epoch or 0))
        self._measures = self.log_policies and self._logs_after_this(args, state)
        if self.installed is not None:
            self.installed.set_loss_scale(_loss_scale(self._trainer))
            self.installed.measure_norms(self._measures)
        if self._measures:
            self._start_measuring().begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the gradients were processed before they were clipped.

        Raises:
            PolicyError: If they were not.
        """
        assert self._trainer is not None
        if _is_deepspeed(self._trainer):
            return
        if not args.max_grad_norm:
            # Nothing is clipped; older Trainers then do not compute the norm either.
            self._trainer.accelerator.unscale_gradients()
        if self.masked_optimizers and not self._has_taken:
            raise PolicyError(
                f"GradientPoliciesCallback: {type(self._trainer).__name__} clipped the gradients in a way of "
                "its own, so that mask sources did not see them; let it call accelerator.clip_grad_norm_"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check after the first update that every operation ran."""
        assert self._trainer is not None
        assert self._trainer.model is not None
        trains = (parameter.requires_grad for parameter in self._trainer.model.parameters())
        self._check_operations_met("fit", thaws=not all(trains))
        if self._measures:
            self._measured = self._measure("fit", self.updates(state))
        self._stop_if_finished(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand what was evaluated during the training to mask sources, such as phases that end by it."""
        if self._trainer is None or self.freezer is None:
            return
        # The Trainer evaluates each of several datasets by itself.
        self._evaluated |= kwargs["metrics"]
        datasets = self._trainer.eval_dataset
        names = datasets if isinstance(datasets, dict) else ()
        if all(f"eval_{name}_runtime" in self._evaluated for name in names):
            metrics, self._evaluated = self._evaluated, {}
            self.freezer.report(metrics)
            self._stop_if_finished(state, control)

    def _stop_if_finished(self, state: TrainerState, control: TrainerControl) -> None:
        if self.freezer is not None and self.freezer.is_finished(self.updates(state), int(state.epoch or 0)):
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add measurements of the policies to the values that the Trainer logs."""
        if logs is None or "loss" not in logs or self._measured is None:
            return
        numbers = self._start_measuring().varying(self._summary(self._measured))
        self._measured = None
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def updates(self, state: TrainerState) -> int:
        """Return the number of updates; if no optimizer is masked, the Trainer's number."""
        return self.masked_optimizers[0].effective_steps if self.masked_optimizers else state.global_step

    def _observe_before_clipping(self, trainer: Trainer) -> None:
        """Process the gradients when accelerate has unscaled them, before clipping.

        The Trainer calls callbacks only after clipping.
        """
        unscale = trainer.accelerator.unscale_gradients

        def unscale_gradients(optimizer: Any = None) -> None:
            if not self._has_taken:
                unscale(optimizer)
                self._take_gradients()

        trainer.accelerator.unscale_gradients = unscale_gradients

    def _take_gradients(self) -> None:
        """Pass the gradients to sources, and zero those of frozen entries."""
        self._has_taken = True
        for optimizer in self.masked_optimizers:
            assert self.freezer is not None
            if self._measures:
                self._start_measuring().take_gradients(optimizer, "gradient_norm_before")
            self.freezer.observe(optimizer)
            optimizer.mask_gradients()
            if self._measures:
                self._start_measuring().take_gradients(optimizer, "gradient_norm_after")

    def _logs_after_this(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Return True if the Trainer logs its loss after the update that is being prepared."""
        assert self._trainer is not None
        if args.logging_strategy == IntervalStrategy.EPOCH:
            return bool(self._trainer.accelerator.gradient_state.end_of_dataloader)
        step = state.global_step + 1
        return args.logging_strategy == IntervalStrategy.STEPS and (
            step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
        )

    # ---- checkpoints

    def _install_freeze(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        toggle_requires_grad: bool = True,
    ) -> list[torch.optim.Optimizer]:
        """Wrap the optimizer, into which the Trainer has already loaded a checkpoint unless it is sharded."""
        (optimizer,) = optimizers
        # A plain optimizer keeps unknown values in its param groups: masks, and the state of the policies.
        saved = optimizer.state_dict()
        wrapped = super()._install_freeze(model, [optimizer], toggle_requires_grad=toggle_requires_grad)
        (masked,) = self.masked_optimizers
        self._hooks.append(masked.register_load_state_dict_pre_hook(self._take_state))
        self._hooks.append(masked.register_load_state_dict_post_hook(self._restore))
        masked.load_state_dict(saved)
        self._hooks.append(masked.register_state_dict_post_hook(self._save))
        return wrapped

    def _save(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Add the state of the policies to the optimizer's state_dict."""
        assert self._trainer is not None
        state = {**self.state_dict(), "global_step": self._trainer.state.global_step}
        self._put_state(optimizer, saved, state)

    def _restore(self, optimizer: Any) -> None:
        """Restore the policies from the state that came with the optimizer's."""
        assert self._trainer is not None
        state, steps = self._loaded.pop(optimizer), self._trainer.state.global_step
        if state.get("global_step") == steps:
            self._apply_restored(state)
        else:
            optimizer.effective_steps = 0
        optimizer.effective_steps = optimizer.effective_steps or steps


def _calling_trainer() -> Trainer:
    """Return the Trainer that is calling the callback, which it does not pass as an argument.

    Raises:
        PolicyError: If there is none.
    """
    trainer = calling(Trainer)
    if trainer is None:
        raise PolicyError("GradientPoliciesCallback: no Trainer calls it; give it to one as callbacks=[...]")
    return trainer


def _check_supported(trainer: Trainer) -> None:
    """Check that the Trainer's settings are supported.

    Raises:
        PolicyError: If they are not; has the reason and an alternative.
    """
    accelerator, instead = trainer.accelerator, "use DDP: accelerate launch --multi_gpu, or torchrun"
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise flat_parameters_refused()
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise PolicyError(
            f"GradientPoliciesCallback: the model was sharded as it was loaded (DistributedConfig), and the "
            f"Trainer then clips gradients where mask sources cannot see them before; {instead}"
        )
    if trainer.args.n_gpu > 1:
        raise PolicyError(
            "GradientPoliciesCallback: nn.DataParallel copies the model for each forward pass, without its "
            f"policies; {instead}"
        )


def _is_deepspeed(trainer: Trainer) -> bool:
    return bool(trainer.accelerator.distributed_type == DistributedType.DEEPSPEED)


def _loads_before_callbacks(trainer: Trainer) -> bool:
    """Return True if the Trainer loads a checkpoint into model and optimizer before it calls callbacks."""
    return bool(trainer.accelerator.is_fsdp2) or _is_deepspeed(trainer)


def _loss_scale(trainer: Trainer) -> float:
    """Return the factor on the loss, of accelerate's scaler or of DeepSpeed's optimizer."""
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        return float(scaler.get_scale())
    return float(getattr(innermost(trainer.optimizer), "loss_scale", 1.0))
