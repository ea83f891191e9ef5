"""Policies that cannot act on the partitions of a DeepSpeed engine are refused by name."""

import pytest

import gradpolicy as gp

pytest.importorskip("deepspeed")
from gradpolicy.train.partitioned_optimizer import PartitionedOptimizer


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": gp.Freeze(gp.masks.TopK(0.5))}, r"policy\.a: .*: TopK needs whole gradients"),
        ({"a": gp.Freeze(gp.masks.Zeros())}, r"policy\.a: .*: Zeros may write to weights"),
        ({"a": gp.Freeze(True, bias_correction="tensor")}, r"policy\.a: .*: bias_correction='tensor'"),
        (
            {"a": gp.Freeze(True), "b": gp.Rates({"*": 0.5})},
            r"policy\.b: .*: Rates acts on the model's parameters",
        ),
        (
            {"a": gp.Freeze(True), "b": gp.Freeze(True, frozen_state="zero")},
            r"frozen_state: must be the same .* policy\.a: 'keep', policy\.b: 'zero'",
        ),
    ],
)
def test_what_cannot_act_on_partitions_is_refused(policies, message):
    with pytest.raises(gp.PolicyError, match=message):
        PartitionedOptimizer(None, policies)
