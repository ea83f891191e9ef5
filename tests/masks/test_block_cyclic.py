"""BAdam: block after block, each once a cycle."""

import pytest

import gradpolicy as gp
from gradpolicy.errors import PolicyError

BLOCKS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
BLOCK_OF_FOUR = "embed+blocks.0+blocks.1+blocks.2"


def visited(source, turns: int, every: int = 1) -> list[str]:
    return [source.active_block(turn * every, 0).name for turn in range(turns)]


def test_forward_and_reverse_run_through_the_blocks(prepared) -> None:
    assert visited(prepared(gp.masks.BlockCyclic(every=1)), 8) == BLOCKS + BLOCKS[:2]
    reverse = prepared(gp.masks.BlockCyclic("reverse", every=1))
    assert visited(reverse, 8) == BLOCKS[::-1] + BLOCKS[::-1][:2]


def test_random_order_visits_each_block_once_a_cycle_in_a_new_order(prepared) -> None:
    source = prepared(gp.masks.BlockCyclic("random", every=1))
    turns = visited(source, 60)
    cycles = [turns[i : i + 6] for i in range(0, 60, 6)]
    assert all(sorted(cycle) == sorted(BLOCKS) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) > 5
    assert visited(prepared(gp.masks.BlockCyclic("random", every=1)), 60) == turns
    assert visited(prepared(gp.masks.BlockCyclic("random", every=1), seed=1), 60) != turns


def test_neighbouring_layers_may_form_a_block(prepared) -> None:
    source = prepared(gp.masks.BlockCyclic(size=4, every=1))
    assert visited(source, 3) == [BLOCK_OF_FOUR, "blocks.3+head", BLOCK_OF_FOUR]


def test_blocks_may_be_given(prepared, trained) -> None:
    """BAdam's own default: the layers take turns, embedding and head never train."""
    source = prepared(gp.masks.BlockCyclic(groups=["blocks.0.*", ["blocks.1.*", "blocks.2.*"]], every=1))
    assert [len(trained(source.masks(step, 0))) for step in range(4)] == [2, 4, 2, 4]
    assert all(source.masks(step, 0)["embed.weight"] is False for step in range(4))


def test_wrong_arguments_are_errors(prepared) -> None:
    with pytest.raises(PolicyError, match="did you mean 'reverse'"):
        gp.masks.BlockCyclic("reversed")
    with pytest.raises(PolicyError, match="size goes with layers"):
        gp.masks.BlockCyclic(groups=["head.*"], size=2)
    with pytest.raises(PolicyError, match="did you mean 'head"):
        prepared(gp.masks.BlockCyclic(groups=["haed.*"]))
