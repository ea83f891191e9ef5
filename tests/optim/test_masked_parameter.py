import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError

KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_a_parameter_that_was_given_another_shape_is_refused(kind, frozen_state):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = MaskedOptimizer(KINDS[kind]([weight]), frozen_state=frozen_state)
    optimizer.set_mask(weight, torch.eye(4, 3, dtype=torch.bool))
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    weight.grad = None
    weight.data = torch.randn(400, 3)
    weight.grad = torch.ones(400, 3)
    # A kernel that believed the old shape would read and write beyond the ends of codes and moments.
    for use in (
        optimizer.step,
        optimizer.mask_gradients,
        optimizer.state_dict,
        lambda: optimizer.get_mask(weight),
        lambda: optimizer.age(weight),
        lambda: optimizer.set_mask(weight, None),
    ):
        with pytest.raises(PolicyError, match=r"shape \(4, 3\) now has the shape \(400, 3\)"):
            use()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_a_parameter_may_move_to_other_memory_and_strides(kind, frozen_state):
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2, dtype=torch.float64))
        optimizer = MaskedOptimizer(KINDS[kind]([weight]), frozen_state=frozen_state)
        for step in range(6):
            if moves and step == 2:
                weight.data = weight.data.to(memory_format=torch.channels_last)
            if moves and step == 4:
                weight.data = torch.stack([weight.data, weight.data], dim=-1)[..., 1]
            if step % 2:
                optimizer.set_mask(weight, torch.rand(4, 3, 2, 2) < 0.5)
            weight.grad = torch.randn(4, 3, 2, 2, dtype=torch.float64)
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)


def test_a_parameter_is_found_in_its_group_wherever_that_has_moved():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (0.1, 0.2), strict=True)]
    optimizer = MaskedOptimizer(torch.optim.AdamW(groups))
    optimizer.set_masks(dict.fromkeys(weights, torch.tensor([True, False])))
    optimizer.param_groups.reverse()
    known = optimizer.masked_parameters()
    assert [known[weight].group["lr"] for weight in weights] == [0.1, 0.2]
