"""Policies in a plain PyTorch training loop: ``gradpolicy.training``."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, shown
from gradpolicy.flow.install import name_policies
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_optimizer import deepspeed_refused, wrapper_of
from gradpolicy.optim.optimizers import innermost, is_prepared, put_inside
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.train.optimizer_steps import parameters_of
from gradpolicy.train.training_run import Run
from gradpolicy.where import ModelHook, named_parameters

Policies = Mapping[str, Policy | None] | Iterable[Policy]
MOST_FOLLOWED = 4096
"""The number of entries up to which a parameter is followed to find steps of other libraries' optimizers."""
# The optimizers of all active blocks.
_TRAINING: weakref.WeakSet[MaskedOptimizer] = weakref.WeakSet()


class Options(TypedDict, total=False):
    """The other arguments of :func:`training`."""

    steps_per_epoch: int | None
    scaler: torch.amp.GradScaler | None
    toggle_requires_grad: bool
    step_in_backward: bool
    master_weights: bool
    layers: bool | None


@overload
def training(
    model: nn.Module, optimizer: Optimizer, policies: Policies, seed: int = 0, **options: Unpack[Options]
) -> AbstractContextManager[MaskedOptimizer]: ...
@overload
def training(
    model: nn.Module,
    optimizer: Sequence[Optimizer],
    policies: Policies,
    seed: int = 0,
    **options: Unpack[Options],
) -> AbstractContextManager[list[MaskedOptimizer]]: ...
@contextmanager
def training(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    policies: Policies,
    seed: int = 0,
    *,
    steps_per_epoch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    toggle_requires_grad: bool = True,
    step_in_backward: bool = False,
    master_weights: bool = False,
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
        scaler: The ``GradScaler``, if there is one and a policy, such as ``Clip`` or one with a rule of your
            own, depends on the loss scale.
        toggle_requires_grad: Turn ``requires_grad`` off for tensors that are frozen completely, so that the
            backward pass skips them. Pass False if one compiled function is the training step.
        step_in_backward: Update each parameter in the backward pass as soon as its gradient is complete, and
            free the gradient. Do not clip by norm, accumulate gradients or use a ``GradScaler`` then.
        master_weights: Update all bfloat16 and float16 parameters as float32, with 16 more bits for each
            active entry.
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
    given: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    if not isinstance(model, nn.Module):
        raise PolicyError(f"training: needs the model first, then its optimizer; got {shown(model)}")
    if isinstance(policies, Policy) or not isinstance(policies, Iterable):
        raise PolicyError(f"training: needs a list or dict of policies, got {shown(policies)}")
    if steps_per_epoch is not None:
        check_integer("training.steps_per_epoch", steps_per_epoch, least=1)
    run = Run(
        name_policies(policies),
        seed=seed,
        layers=layers,
        step_in_backward=step_in_backward,
        master_weights=master_weights,
    )
    _check_times(run.policies, steps_per_epoch)
    finished = False
    try:
        masked = _install(run, model, given, scaler, toggle_requires_grad=toggle_requires_grad)
        check_moves = _begin_before_forward(run, model)
        run.steps_per_epoch = steps_per_epoch
        if scaler is None:
            _require_scaler(run)
        yield masked if several else masked[0]
        check_moves()
        run.freezer.finish()
        finished = True
    finally:
        run.remove(quiet=not finished, clear_masks=True)
        _TRAINING.difference_update(run.steps.masked)
        for each in run.steps.masked:
            each.sees_loss_scale = False


def _check_times(policies: Mapping[str, Policy], steps_per_epoch: int | None) -> None:
    """Check that each policy acts in training, and that epochs are known if one counts them.

    Raises:
        PolicyError: If not.
    """
    for name, policy in policies.items():
        if "fit" not in policy.when.phases:
            raise PolicyError(
                f"policy.{name}: holds in the phases {', '.join(policy.when.phases)} alone, and a "
                "training loop is the phase fit; put it on the model with gradpolicy.install"
            )
        times = [policy.when, *([policy.mask.timetable] if isinstance(policy, Freeze) else [])]
        if any(each.unit == "epoch" for each in times) and steps_per_epoch is None:
            raise PolicyError(
                f"policy.{name}: counts epochs; say how many optimizer steps an epoch has: "
                "gradpolicy.training(..., steps_per_epoch=len(loader))"
            )


def _install(
    run: Run, model: nn.Module, given: Sequence[Any], scaler: Any, *, toggle_requires_grad: bool
) -> list[Any]:
    """Install the policies of a run, and return the optimizers to train with.

    Raises:
        PolicyError: If an optimizer is none, or trains in another block.
    """
    optimizers: list[Any] = [innermost(each) for each in given]
    for each in optimizers or [()]:
        if type(each).__module__.startswith("deepspeed"):
            raise deepspeed_refused(type(each).__name__)
        if not isinstance(each, Optimizer):
            raise PolicyError(f"training: needs an optimizer, or a list of them; got {shown(each)}")
    if not _TRAINING.isdisjoint(wrapper_of(each) or each for each in optimizers):
        raise PolicyError(
            "training: the optimizer trains under the policies of an outer gradpolicy.training; give all "
            "policies to one of them"
        )
    # Everything that trains must require a gradient before DistributedDataParallel is created.
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    trained = [p for each in optimizers for p in parameters_of(each)]
    plain: Any = getattr(model, "_orig_mod", model)
    wraps = isinstance(plain, DistributedDataParallel) or type(plain).__name__ == "DeepSpeedEngine"
    follows = alone or wraps or all(map(is_sharded, trained))
    masked = run.install(
        plain.module if wraps else model,
        optimizers,
        wrapped=plain if wraps else None,
        scaler=scaler,
        toggle_requires_grad=toggle_requires_grad and follows and len(optimizers) == 1,
        driven=False,
    )
    for prepared, each in zip(given, masked, strict=True):
        put_inside(prepared, each)
    _TRAINING.update(masked)
    return [prepared if is_prepared(prepared) else each for prepared, each in zip(given, masked, strict=True)]


def _check_parameters(run: Run, model: nn.Module) -> None:
    """Check that the policies know the parameters that train.

    Raises:
        PolicyError: If they were replaced within the block.
    """
    now = named_parameters(model)
    for name, known in run.freezer.parameters.items():
        if now.get(name, known) is not known:
            raise PolicyError(
                f"gradpolicy.training: {name} was replaced after the block began, and the policies do "
                "not know the new one; shard the model before (fully_shard, accelerator.prepare)"
            )


def _begin_before_forward(run: Run, model: nn.Module) -> Callable[[], object]:
    """Begin each update in its first forward pass, once the parameters that train are known.

    Returns:
        A function that checks, unless an optimizer has stepped, that parameters have not changed since the
        second forward pass. Each later pass calls it too: optimizers of other libraries, such as fastai's,
        step without the hooks of torch's.
    """
    stepped: set[Any] = set()
    parameters = [p for each in run.steps.masked for p in parameters_of(each)]
    trained = [p for p in parameters if p.requires_grad]
    # Every optimizer moves small ones too, such as biases.
    followed = [p for p in trained if p.numel() <= MOST_FOLLOWED] or trained[:1]
    at_passes: list[list[Tensor]] = []

    @torch.compiler.disable(
        reason="policies set the masks of an update before the model's forward pass; leave "
        "fullgraph out, or give gradpolicy.training the compiled module"
    )
    def begin() -> None:
        if not stepped:
            _check_parameters(run, model)
            # Two-step sharpness-aware minimization has its second pass at other weights.
            if len(at_passes) == 2:
                check_moves()
            elif run.has_gradients:  # else they are updated before the optimizer's step
                at_passes.append([p.detach().clone() for p in followed])
        run.begin()

    def before_forward(*_: Any) -> None:
        if torch.is_grad_enabled():
            begin()

    @torch.compiler.disable
    def before_step(optimizer: Any, *_: Any) -> None:
        at_passes.clear()
        if optimizer not in stepped:
            _check_parameters(run, model)
            stepped.add(optimizer)

    def check_moves() -> None:
        if at_passes and not all(map(torch.equal, followed, at_passes[-1])):
            kinds = ", ".join(type(each.inner).__name__ for each in run.steps.masked)
            raise PolicyError(
                f"gradpolicy.training: parameters have changed without a step of {kinds}: pass the optimizer "
                "that gradpolicy.training returns to what trains (fastai: opt_func=lambda *_, **__: "
                "OptimWrapper(opt=optimizer)); optimizers that are none of torch's step past the policies"
            )

    # Before FSDP2 gathers the root's parameters, whose values mask sources may change.
    run.steps.hooks.append(model.register_forward_pre_hook(ModelHook(before_forward), prepend=True))
    run.steps.hooks += [each.register_step_pre_hook(before_step) for each in run.steps.masked]
    return check_moves


def _require_scaler(run: Run) -> None:
    """Refuse steps of a GradScaler if a policy depends on the loss scale."""
    flow = {name: policy for name, policy in run.policies.items() if isinstance(policy, FlowPolicy)}
    bounded = [name for name, policy in flow.items() if policy.rule.depends_on_scale]

    @torch.compiler.disable
    def refuse(optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            del optimizer.grad_scale, optimizer.found_inf  # the scaler does not after an error
            kind = "bound" if flow[bounded[0]].rule.is_built_in else "rule"
            raise PolicyError(
                f"policy.{bounded[0]}: its {kind} must follow the loss scale, which a GradScaler sets; "
                "name it: gradpolicy.training(..., scaler=scaler)"
            )

    for each in run.steps.masked if bounded else ():
        each.sees_loss_scale = True
        run.steps.hooks.append(each.register_step_pre_hook(refuse))
