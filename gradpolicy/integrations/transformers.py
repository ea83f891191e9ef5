"""The callback for Hugging Face's Trainer and its subclasses, such as TRL's SFTTrainer."""

import inspect
import weakref
from functools import partial
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from gradpolicy.errors import PolicyError
from gradpolicy.optim.optimizers import innermost, put_inside
from gradpolicy.train.step_in_backward import refused
from gradpolicy.train.training_run import Driven, check_evaluates, flat_parameters_refused


class GradientPoliciesCallback(Driven, TrainerCallback):
    """Trains under gradient policies with Hugging Face's Trainer.

    The callback does the following:

    - at the start of training: flow policies are installed on the model; if there are freeze policies, the
      optimizer that accelerate has prepared is wrapped in :class:`~gradpolicy.MaskedOptimizer`;
    - before the first batch of each update: schedules are evaluated and new masks are set;
    - in the backward pass: gradients of frozen entries are zeroed, so that they are neither in the clipped
      norm nor in the logged ``grad_norm``; if a mask source needs the gradients, it gets them after they are
      unscaled and before they are clipped;
    - when the Trainer logs: measurements of the policies are added, for all of its trackers;
    - when it saves: masks, ages and the state of mask sources are saved with the optimizer's state;
    - when training ends: everything is removed from the model and the optimizer; of a training that failed
      when a Trainer is made for the next one, or by :meth:`remove`.

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
        step_in_backward: Update each parameter in the backward pass as soon as its gradient is complete, and
            free the gradient. Of freeze policies only the active shares are logged then.
        master_weights: Update all bfloat16 and float16 parameters as float32, with 16 more bits for each
            active entry.

    Attributes:
        run: The run, which has the masked optimizer, the freezer and the flow policies on the model.

    Raises:
        PolicyError: If an entry is not a policy; when training starts, if a pattern matches nothing, two
            policies contradict each other, the Trainer uses version 1 of FSDP or ``nn.DataParallel``, or a
            policy or setting does not work with DeepSpeed; in the first update, if the Trainer clips
            gradients in a way of its own, or an operation that a policy names never ran.

    Example:
        >>> import gradpolicy as gp
        >>> callback = GradientPoliciesCallback({"tenth": gp.Freeze(gp.masks.Random(density=0.1))})
        >>> list(callback.policies)  # then: Trainer(..., callbacks=[callback])
        ['tenth']
    """

    # The Trainer that was made with this callback, and the one that trains under its policies.
    _made_with: Trainer | None = None
    _trainer: Trainer | None = None
    # True if policies were installed to load a checkpoint.
    _is_loading = False
    # True once the gradients of an update were processed.
    _has_taken = False
    _evaluated: dict[str, float]

    # ---- installing and removing

    def on_init_end(self, *_: Any, **kwargs: Any) -> None:
        """Check that the Trainer's settings are supported, before anything is prepared.

        Also remove the policies of a failed training, before the Trainer chooses what its optimizer gets.
        """
        self._made_with = trainer = _calling_trainer()
        self._remove_former(trainer)
        _check_supported(trainer, in_backward=self.run.in_backward)
        if _loads_before_callbacks(trainer) and trainer.model is not None:
            # Of a sharded checkpoint, what the optimizer does not have when it is loaded is not read. The
            # Trainer loads the weights first, into the prepared model.
            trainer.model.register_load_state_dict_post_hook(partial(self._install_to_load, trainer))

    def _install_to_load(self, trainer: Trainer, *_: Any) -> None:
        prepared = isinstance(trainer.optimizer, AcceleratedOptimizer)
        if trainer.is_in_train and prepared and self._trainer is None:
            self._install(trainer)
            self._is_loading = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Install all policies: the model and the optimizer are prepared, and a checkpoint is loaded."""
        trainer = _calling_trainer()
        self._evaluated = {}
        _check_supported(trainer, in_backward=self.run.in_backward)
        if _loads_before_callbacks(trainer) and self._made_with is not trainer:
            raise PolicyError(
                "GradientPoliciesCallback: under FSDP2 and DeepSpeed a checkpoint is loaded before callbacks "
                "are called; give it to the Trainer as callbacks=[...], not by add_callback"
            )
        evaluates = args.eval_strategy != IntervalStrategy.NO
        check_evaluates(self.policies, evaluates, 'eval_strategy="steps" or "epoch", and an eval_dataset')
        if not self._is_loading:
            self._install(trainer)
        self._is_loading = False
        for name, policy in self.policies.items():
            if "fit" not in policy.when.phases:
                self.run.notices.warn(
                    f"policy.{name}: does nothing in the phases {', '.join(policy.when.phases)}, where the "
                    "Trainer takes no gradients; put it on the model with gradpolicy.install"
                )
        # Trackers must run after this callback, to get the values that it adds to the logs.
        others = [each for each in trainer.callback_handler.callbacks if each is not self]
        trainer.callback_handler.callbacks = [self, *others]
        self.run.count_from(state.global_step)
        if self.log_policies:
            every = _steps_of_epoch(args, kwargs.get("train_dataloader"))
            self.run.measure(lambda updates: _logs_after(updates + 1, args, state, every))

    def _install(self, trainer: Trainer) -> None:
        """Install all policies."""
        assert trainer.model is not None
        model, wrapped = trainer.model, trainer.model_wrapped
        self._remove_former(trainer)
        self.remove()  # auto_find_batch_size starts again after running out of memory
        self._trainer, _TRAINED_BY[model] = trainer, weakref.ref(self)
        # Of a training that failed, nobody may have the Trainer any more.
        weakref.finalize(self, self.run.remove).atexit = False
        # Compiled code would be recompiled each time requires_grad changes.
        optimizers = self.run.install(
            getattr(model, "_orig_mod", model),
            [innermost(trainer.optimizer)],
            wrapped=getattr(wrapped, "_orig_mod", wrapped),
            scaler=trainer.accelerator.scaler,
            toggle_requires_grad=not is_compiled_module(wrapped),
        )
        if not trainer.is_deepspeed_enabled:
            put_inside(trainer.optimizer, *optimizers)
            self._observe_before_clipping(trainer)

    def _remove_former(self, trainer: Trainer) -> None:
        """Remove the policies that another Trainer's failed training has left on the model."""
        former = _TRAINED_BY.get(trainer.model) if trainer.model is not None else None
        callback = former() if former is not None else None
        if callback is not None and callback._trainer not in (None, trainer):
            callback.remove()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Remove everything from the model and the optimizer."""
        self.run.freezer.finish()
        self.remove(quiet=False)

    def remove(self, *, quiet: bool = True) -> None:
        """Remove everything from the model and the optimizer, quietly after a training that has failed."""
        self.run.remove(quiet=quiet, clear_masks=True)
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        vars(trainer.accelerator).pop("unscale_gradients", None)
        for optimizer in self.run.steps.masked:
            if innermost(trainer.optimizer) is optimizer:
                put_inside(trainer.optimizer, optimizer.inner)

    # ---- training

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin an update before its first batch."""
        self._has_taken = False
        self.run.begin(int(state.epoch or 0))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the gradients were processed before they were clipped.

        Raises:
            PolicyError: If they were not.
        """
        assert self._trainer is not None
        if self._trainer.is_deepspeed_enabled:
            return
        if not args.max_grad_norm:
            # Nothing is clipped; older Trainers then do not compute the norm either.
            self._trainer.accelerator.unscale_gradients()
        if self.run.steps.masked and not self._has_taken:
            raise PolicyError(
                f"GradientPoliciesCallback: {type(self._trainer).__name__} clipped the gradients in a way of "
                "its own, so that mask sources did not see them; let it call accelerator.clip_grad_norm_"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if a mask source ends the training."""
        if not self.run.steps.optimizers:
            self.run.end()
        self._stop_if_finished(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand what was evaluated during the training to mask sources, such as phases that end by it."""
        if self._trainer is None:
            return
        # The Trainer evaluates each of several datasets by itself.
        self._evaluated |= kwargs["metrics"]
        datasets = self._trainer.eval_dataset
        names = datasets if isinstance(datasets, dict) else ()
        if all(f"eval_{name}_runtime" in self._evaluated for name in names):
            metrics, self._evaluated = self._evaluated, {}
            self.run.freezer.report(metrics)
            self._stop_if_finished(state, control)

    def _stop_if_finished(self, state: TrainerState, control: TrainerControl) -> None:
        if self.run.freezer.is_finished(self.run.updates, int(state.epoch or 0)):
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
        if logs is None or "loss" not in logs or self._trainer is None:
            return
        numbers = self.run.take_measured()
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def _observe_before_clipping(self, trainer: Trainer) -> None:
        """Process the gradients when accelerate has unscaled them, before clipping.

        The Trainer calls callbacks only after clipping.
        """
        unscale = trainer.accelerator.unscale_gradients

        def unscale_gradients(optimizer: Any = None) -> None:
            if not self._has_taken:
                unscale(optimizer)
                self._has_taken = True
                for each in self.run.steps.optimizers:
                    self.run.gradients(each)

        trainer.accelerator.unscale_gradients = unscale_gradients


_TRAINED_BY: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientPoliciesCallback]] = (
    weakref.WeakKeyDictionary()
)
"""The callback of the last training of a model."""


def _calling_trainer() -> Trainer:
    """Return the Trainer that is calling the callback, which it does not pass as an argument.

    Raises:
        PolicyError: If there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise PolicyError("GradientPoliciesCallback: no Trainer calls it; give it to one as callbacks=[...]")


def _steps_of_epoch(args: TrainingArguments, loader: Any) -> int:
    """Return the number of updates of an epoch; 1 if the loader does not know its length."""
    batches = len(loader) if hasattr(loader, "__len__") else 1
    return -(-batches // args.gradient_accumulation_steps)


def _logs_after(step: int, args: TrainingArguments, state: TrainerState, steps_of_epoch: int) -> bool:
    """Return True if the Trainer logs its loss after an update."""
    if args.logging_strategy == IntervalStrategy.EPOCH:
        return step % steps_of_epoch == 0
    return args.logging_strategy == IntervalStrategy.STEPS and (
        step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
    )


def _check_supported(trainer: Trainer, *, in_backward: bool) -> None:
    """Check that the Trainer's settings are supported.

    Raises:
        PolicyError: If they are not; has the reason and an alternative.
    """
    args, accelerator = trainer.args, trainer.accelerator
    instead = "use DDP: accelerate launch --multi_gpu, or torchrun"
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise flat_parameters_refused()
    if args.n_gpu > 1:
        raise PolicyError(
            "GradientPoliciesCallback: nn.DataParallel copies the model for each forward pass, without its "
            f"policies; {instead}"
        )
    if in_backward and args.gradient_accumulation_steps != 1:
        raise refused(f"gradient_accumulation_steps={args.gradient_accumulation_steps}", "1")
    if in_backward and args.max_grad_norm:
        raise refused(
            f"max_grad_norm={args.max_grad_norm} (the Trainer clips at 1.0 by default)",
            "max_grad_norm=0, and gp.Clip to bound gradients",
        )


def _loads_before_callbacks(trainer: Trainer) -> bool:
    """Return True if the Trainer loads a checkpoint into model and optimizer before it calls callbacks."""
    return bool(trainer.accelerator.is_fsdp2 or trainer.is_deepspeed_enabled)
