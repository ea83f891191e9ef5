"""Policies with a DeepSpeed engine (ZeRO 1, 2, 3), in a loop of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed import DeepSpeedEngine

from gradpolicy.flow.install import name_policies
from gradpolicy.train.loop import Policies
from gradpolicy.train.loop import training as plain_training
from gradpolicy.train.partitioned_optimizer import PartitionedOptimizer


@contextmanager
def training(
    engine: DeepSpeedEngine,
    policies: Policies,
    seed: int = 0,
    *,
    steps_per_epoch: int | None = None,
    layers: bool | None = None,
) -> Iterator[PartitionedOptimizer]:
    """Train under policies with a DeepSpeed engine, as `gradpolicy.training` does in a plain loop.

    Within the block, call ``engine(...)``, ``engine.backward(loss)`` and ``engine.step()`` as usual, and
    ``engine.save_checkpoint`` and ``engine.load_checkpoint``: masks, ages and the state of mask sources are
    saved with each rank's part of the optimizer's state.

    Args:
        engine: What ``deepspeed.initialize`` has returned, with ZeRO stage 1, 2 or 3.
        policies: Flow and freeze policies, by name or in a list; parameters have their names in the model.
        seed: The seed of mask sources without a seed of their own.
        steps_per_epoch: The number of optimizer steps per epoch, for policies that count epochs.
        layers: Print what trains, layer by layer, before the first update. None prints it if the output is a
            terminal.

    Yields:
        The optimizer of the model's parameters, for its ``get_mask`` and ``effective_steps``.

    Raises:
        PolicyError: As `gradpolicy.training`, and if a policy, the optimizer or a setting of the engine does
            not work with partitions.
    """
    named = name_policies(policies)
    optimizer = PartitionedOptimizer(engine, named)
    block = plain_training(engine, optimizer, named, seed, steps_per_epoch=steps_per_epoch, layers=layers)
    try:
        with block:
            yield optimizer
    finally:
        optimizer.remove()
