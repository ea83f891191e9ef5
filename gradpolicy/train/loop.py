"""Policies in a plain PyTorch training loop: ``gradpolicy.training``."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, shown
from gradpolicy.flow.install import name_policies
from gradpolicy.flow.locations import is_cut
from gradpolicy.freezing.moving_parts import copy_buffers
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import as_masked, deepspeed_refused, wrapper_of
from gradpolicy.optim.prepared import innermost, is_prepared, put_inside
from gradpolicy.policies import Freeze, Policy
from gradpolicy.rules.registry import keyword_names
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.train.step_in_backward import StepInBackward, check_process_group, refused
from gradpolicy.train.training_policies import STATE, TrainingPolicies, calling
from gradpolicy.where import named_parameters

Policies = Mapping[str, Policy | None] | Iterable[Policy]
# The optimizers of all active blocks.
_TRAINING: weakref.WeakSet[MaskedOptimizer] = weakref.WeakSet()


@overload
def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    policies: Policies,
    seed: int = 0,
    *,
    steps_per_epoch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    toggle_requires_grad: bool = True,
    step_in_backward: bool = False,
    layers: bool | None = None,
) -> AbstractContextManager[MaskedOptimizer]: ...
@overload
def training(
    model: nn.Module,
    optimizer: Sequence[torch.optim.Optimizer],
    policies: Policies,
    seed: int = 0,
    *,
    steps_per_epoch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    toggle_requires_grad: bool = True,
    step_in_backward: bool = False,
    layers: bool | None = None,
) -> AbstractContextManager[list[MaskedOptimizer]]: ...
@contextmanager
def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    policies: Policies,
    seed: int = 0,
    *,
    steps_per_epoch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    toggle_requires_grad: bool = True,
    step_in_backward: bool = False,
    layers: bool | None = None,
) -> Iterator[Any]:
    """Train under policies in your own loop.

    Within the block, train with the optimizer that it returns; calling its ``step()`` is enough.

    - New masks are set at the first forward pass after a step. Gradients of several backward passes are
      accumulated under the same masks.
    - Gradients of frozen entries are zeroed as they are computed, so that they are not part of clipped norms
      or logs; except in steps in which a mask source, such as ``TopK``, needs them.
    - A step that ``GradScaler`` skips does not count.
    - The optimizer's ``state_dict`` includes masks, ages and the state of mask sources.
    - At the end of the block masks and policies are removed.

    With several optimizers, new masks are set once each has stepped, or when one steps again; the first one's
    ``state_dict`` includes the state of mask sources.

    Args:
        model: The model, or the DistributedDataParallel module. ``fully_shard`` it before the block.
        optimizer: The optimizer, or a list of several. One that accelerate has prepared is returned as it is,
            with the masked one inside.
        policies: Flow and freeze policies, by name or in a list.
        seed: The seed of mask sources without a seed of their own.
        steps_per_epoch: The number of optimizer steps per epoch, for policies that count epochs.
        scaler: The ``GradScaler``, if there is one and a policy such as ``Clip`` depends on the loss scale.
        toggle_requires_grad: Turn ``requires_grad`` off for tensors that are frozen as a whole, so that the
            backward pass skips them. Pass False if the whole training step is one compiled function.
        step_in_backward: Update each parameter in the backward pass as soon as its gradient is complete, and
            free the gradient. Do not clip by norm, accumulate gradients or use a ``GradScaler`` then.
        layers: Print what trains, layer by layer, before the first update. None prints it if the output is a
            terminal.

    Returns:
        A context manager that returns the optimizer to train with, or a list of them.

    Raises:
        PolicyError: If a pattern matches nothing, policies contradict each other, or one counts epochs
            without ``steps_per_epoch``; within the block, if another optimizer than the given one is stepped.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> policies = [gp.Clip(norm=1.0, modules=""), gp.Freeze(gp.masks.Random(0.1), params="weight")]
        >>> with training(model, optimizer, policies, seed=0) as optimizer:
        ...     for x in torch.ones(3, 1, 4):
        ...         model(x).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.effective_steps
        3
    """
    several = isinstance(optimizer, list | tuple)
    optimizers = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    if not isinstance(model, nn.Module):
        raise PolicyError(f"training: needs the model first, then its optimizer; got {shown(model)}")
    if isinstance(policies, Policy) or not isinstance(policies, Iterable):
        raise PolicyError(f"training: needs a list or dict of policies, got {shown(policies)}")
    loop = _Loop(model, name_policies(policies), seed, steps_per_epoch, scaler, layers)
    finished = False
    try:
        masked = loop.begin(optimizers, toggle_requires_grad)
        if step_in_backward:
            loop.step_in_backward()
        yield masked if several else masked[0]
        if loop.freezer is not None:
            loop.freezer.finish()
        finished = True
    except RuntimeError as error:
        if is_cut(error):
            loop._check_cuts()
        raise
    finally:
        loop.end(quiet=not finished)


class _Loop(TrainingPolicies):
    """Runs policies in a plain loop, by hooks on the model, on gradients and on optimizers."""

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, Policy | None],
        seed: int,
        steps_per_epoch: int | None,
        scaler: torch.amp.GradScaler | None,
        layers: bool | None,
    ) -> None:
        super().__init__(policies, seed=seed, log=False, layers=layers)
        if steps_per_epoch is not None:
            check_integer("training.steps_per_epoch", steps_per_epoch, least=1)
        self.steps_per_epoch, self.scaler = steps_per_epoch, scaler
        whole = getattr(model, "_orig_mod", model)
        self._outer, self._ddp = model, whole if isinstance(whole, DistributedDataParallel) else None
        wraps = self._ddp is not None or type(model).__name__ == "DeepSpeedEngine"
        self.model: Any = whole.module if wraps else model
        self._owner: dict[Tensor, MaskedOptimizer] = {}
        # The parameters whose whole gradient a source needs in this update.
        self._wanted: set[Tensor] = set()
        # The number of updates before this one, and the optimizers that have stepped in this one.
        self._time = 0
        self._stepped: set[MaskedOptimizer] = set()
        self._counts: dict[MaskedOptimizer, int] = {}
        self._has_loaded = False
        self._updates_in_backward: StepInBackward | None = None
        self._check_times()

    def _check_times(self) -> None:
        for name, policy in self.policies.items():
            if "fit" not in policy.when.phases:
                raise PolicyError(
                    f"policy.{name}: holds in the phases {', '.join(policy.when.phases)} alone, and a "
                    "training loop is the phase fit; put it on the model with gradpolicy.install"
                )
            times = [
                policy.when,
                *([policy.mask.timetable] if isinstance(policy, Freeze) else []),
            ]
            if any(each.unit == "epoch" for each in times) and self.steps_per_epoch is None:
                raise PolicyError(
                    f"policy.{name}: counts epochs; say how many optimizer steps an epoch has: "
                    "gradpolicy.training(..., steps_per_epoch=len(loader))"
                )

    # ---- installing and removing

    def begin(self, given: Sequence[Any], toggle_requires_grad: bool) -> list[Any]:
        """Install all policies. Masks are set before the first forward pass.

        Returns:
            The optimizers to train with.
        """
        optimizers: list[Any] = [innermost(each) for each in given]
        for each in optimizers or [()]:
            if type(each).__module__.startswith("deepspeed"):
                raise deepspeed_refused(type(each).__name__)
            if not isinstance(each, torch.optim.Optimizer):
                raise PolicyError(f"training: needs an optimizer, or a list of them; got {shown(each)}")
        # A plain optimizer that has loaded a state with masks keeps it in its param groups.
        loaded = [each.state_dict() if STATE in each.param_groups[0] else None for each in optimizers]
        wrapped = [wrapper_of(each) or as_masked(each) for each in optimizers]
        if not _TRAINING.isdisjoint(wrapped):
            raise PolicyError(
                "training: the optimizer trains under the policies of an outer gradpolicy.training; give all "
                "policies to one of them"
            )
        self._install_flow(self.model)
        for prepared, each in zip(given, wrapped, strict=True):
            put_inside(prepared, each)
            # Before the hooks of the freezer, which raises an error for a step without masks.
            self._hooks.append(each.register_step_pre_hook(self._before_step))
        # Everything that trains must require a gradient before DistributedDataParallel is created.
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        held = [p for each in wrapped for group in each.param_groups for p in group["params"]]
        engine = self._ddp is not None or all(map(is_sharded, held)) or wrapped[0].allows_unused_parameters
        toggles = toggle_requires_grad and (alone or engine) and len(wrapped) == 1
        self._install_freeze(self.model, wrapped, toggle_requires_grad=toggles)
        if self.freezer is not None:
            self._hook_gradients()
        else:
            self.masked_optimizers[:] = wrapped
            self._hook_steps()
        self._check_installed(self.model, wrapped)
        self._join_ranks(self.model, self._ddp)
        self._stepped = set(wrapped)
        self._hook_forward()
        for each, state in zip(wrapped, loaded, strict=True):
            each.register_state_dict_post_hook(self._save)
            self._hooks.append(each.register_load_state_dict_pre_hook(self._take_state))
            self._hooks.append(each.register_load_state_dict_post_hook(self._restore))
            if state is not None:
                each.load_state_dict(state)
        _TRAINING.update(wrapped)
        return [
            prepared if is_prepared(prepared) else each for prepared, each in zip(given, wrapped, strict=True)
        ]

    def step_in_backward(self) -> None:
        """Update each parameter as soon as its gradient is complete."""
        optimizers = self.masked_optimizers
        if self.scaler is not None:
            raise refused("GradScaler", "train in bfloat16 or float32")
        trained = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        check_process_group(sharded=all(map(is_sharded, trained)))
        self._updates_in_backward = StepInBackward(optimizers, self.policies)

    def end(self, *, quiet: bool) -> None:
        """Remove all policies."""
        if self._updates_in_backward is not None:
            self._updates_in_backward.remove()
        self._remove(quiet=quiet)
        _TRAINING.difference_update(self.masked_optimizers)
        held = set(self.freezer.parameters.values()) if self.freezer is not None else set()
        for each in self.masked_optimizers:
            each.set_masks({p: None for group in each.param_groups for p in group["params"] if p in held})

    def _held_parameters(self) -> Mapping[str, Tensor]:
        return named_parameters(self.model)

    def _hook_forward(self) -> None:
        # A copy of the model has this attribute too, but must not copy the loop.
        def before_forward(module: nn.Module, *_: Any) -> None:
            if module is self._outer and torch.is_grad_enabled():
                self._before_forward()

        # Before FSDP2 gathers the root's parameters, whose values mask sources may change.
        self._hooks.append(self._outer.register_forward_pre_hook(before_forward, prepend=True))

    def _hook_gradients(self) -> None:
        """Register hooks on the parameters of freeze policies, including ones that were added later."""
        assert self.freezer is not None
        for name, parameter in self.freezer.parameters.items():
            if parameter not in self._owner and parameter.requires_grad:
                self._owner[parameter] = next(
                    each for each in self.masked_optimizers if _holds(each, parameter)
                )
                self._hooks.append(parameter.register_hook(partial(self._take_gradient, name)))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._mask_gradient))

    # ---- an update

    @torch.compiler.disable(
        reason="policies set the masks of an update before the model's forward pass; leave "
        "fullgraph out, or give gradpolicy.training the compiled module"
    )
    def _before_forward(self) -> None:
        if self.installed is not None and self.scaler is not None:
            self.installed.set_loss_scale(float(self.scaler.get_scale()))
        self._begin_if_over()

    def _begin_if_over(self, *, late: bool = False) -> None:
        over = len(self._stepped) == len(self.masked_optimizers)
        if over or self._has_loaded:
            self._begin(over, late=late)

    def _begin(self, over: bool, *, late: bool) -> None:
        """Set the masks of an update.

        Args:
            over: True if the previous update is over, False if this one continues with loaded masks.
            late: True if the backward pass is running or over.
        """
        if late and any(
            isinstance(each, Freeze) and each.buffers != "move" for each in self.policies.values()
        ):
            raise PolicyError(
                "gradpolicy.training: modules can be kept still (Freeze.buffers) only if the model itself is "
                "called before the backward pass"
            )
        # It is too late to set masks for this forward pass: a tensor that thaws may get no gradient.
        if late and self.freezer is not None and self.freezer.compute_all():
            self._warn(
                "gradpolicy.training: the model was not called before a backward pass, so that tensors "
                "that thaw get no gradient in this update; call the model itself, not its parts or other "
                "methods"
            )
        if over:
            self._time = max(each.effective_steps for each in self.masked_optimizers)
            self._stepped.clear()
        if self._updates_seen < 0:
            self._check_parameters()
        if self._buffers is not None and not late:
            # They were changed by loading the model within the block.
            self._buffers = (self.model, copy_buffers(self.model))
        self._has_loaded = False
        self._begin_update(self._time, self._epoch)
        if self.freezer is not None:
            self._hook_gradients()
            parameters = self.freezer.held
            self._wanted = {parameters[name] for name in self.freezer.wanted_gradients()}

    @property
    def _epoch(self) -> int:
        return 0 if self.steps_per_epoch is None else self._time // self.steps_per_epoch

    @torch.compiler.disable
    def _take_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Process the gradient that a backward pass has accumulated."""
        assert self.freezer is not None
        self._begin_if_over(late=True)
        self.freezer.note_gradient(name, gradient)

    @torch.compiler.disable
    def _mask_gradient(self, parameter: Tensor) -> None:
        """Zero the frozen entries of a gradient, unless new masks may be set before the step."""
        if self.freezer is not None and parameter in self.freezer.dropped:
            parameter.grad = None
        elif parameter not in self._wanted and not self._stepped:
            self._owner[parameter].mask_gradient(parameter)

    @torch.compiler.disable
    def _before_step(
        self, optimizer: MaskedOptimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self._counts:
            self._check_parameters()
            if self.scaler is None:
                self._check_scaler()
        (closure,) = (*arguments[1:], *named.values()) or (None,)
        over = optimizer in self._stepped
        if over or self._has_loaded:
            self._begin(over, late=closure is None)
        self._counts[optimizer] = optimizer.effective_steps
        if closure is None:
            self._observe(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self._observe(optimizer)
            return loss

        return arguments[:1], {"closure": observed}

    def _check_parameters(self) -> None:
        """Check, before the first update, that the policies know the parameters that train.

        Raises:
            PolicyError: If they were sharded within the block.
        """
        groups = [group for each in self.masked_optimizers for group in each.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        now = named_parameters(self.model)
        for name, known in self.freezer.parameters.items() if self.freezer is not None else ():
            # During a forward pass the model has whole parameters in the place of sharded ones.
            if id(known) not in trained or (is_sharded(now.get(name, known)) and not is_sharded(known)):
                raise PolicyError(
                    f"gradpolicy.training: {name} was replaced after the block began, and the policies do "
                    "not know the new one; shard the model before (fully_shard, accelerator.prepare)"
                )

    def _check_scaler(self) -> None:
        """Check, before the first update, that the loss scale is known if a policy needs it.

        Raises:
            PolicyError: If a loss scaler makes this step that was not passed to the loop.
        """
        bounded = [
            name
            for name, policy in self.flow_policies.items()
            if "loss_scale" in (keyword_names(policy.rule.function) or ())
        ]
        scaler = calling(torch.amp.GradScaler) if bounded else None
        if scaler is not None and scaler.get_scale() != 1.0:
            raise PolicyError(
                f"policy.{bounded[0]}: its bound must follow the loss scale, which a GradScaler sets; "
                "name it: gradpolicy.training(..., scaler=scaler)"
            )

    def _observe(self, optimizer: Any) -> None:
        """Pass gradients to sources, divided by the loss scale if a fused optimizer does so in its step."""
        if self.freezer is None:
            return
        if self._wanted and getattr(optimizer, "grad_scale", None) is not None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(optimizer.grad_scale)
            optimizer.grad_scale = None
        self.freezer.observe(optimizer)

    @torch.compiler.disable
    def _finish_step(self, optimizer: MaskedOptimizer, *_: Any) -> None:
        if optimizer not in self._counts:
            return  # it was a probe
        super()._finish_step()
        if optimizer.effective_steps == self._counts[optimizer]:
            return  # skipped by mixed precision
        self._stepped.add(optimizer)
        self._check_operations_met("fit", thaws=any(not p.requires_grad for p in self.model.parameters()))
        if self.installed is not None and len(self._stepped) == len(self.masked_optimizers):
            # The hook does not run if the next forward pass is compiled.
            updates = max(each.effective_steps for each in self.masked_optimizers)
            epoch = 0 if self.steps_per_epoch is None else updates // self.steps_per_epoch
            self.installed.update(step=updates, epoch=epoch)

    # ---- checkpoints

    def _save(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Add the progress of the loop to a state_dict, and to the first optimizer's the state of sources."""
        state = {
            "effective_steps": optimizer.effective_steps,
            "stepped": optimizer in self._stepped,
            "time": self._time,
        }
        if optimizer is self.masked_optimizers[0]:
            state |= self.state_dict()
        self._put_state(optimizer, saved, state)

    def _restore(self, optimizer: Any) -> None:
        state = self._loaded.pop(optimizer)
        optimizer.effective_steps = state.get("effective_steps", optimizer.effective_steps)
        self._time = state.get("time", self._time)
        (self._stepped.add if state.get("stepped", True) else self._stepped.discard)(optimizer)
        if self.freezer is not None:
            # Loading has replaced the masks that were set.
            self.freezer.set_anew()
        if "freezer" in state:
            self._apply_restored(state)
        self._has_loaded, self._updates_seen = True, -1


def _holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])
