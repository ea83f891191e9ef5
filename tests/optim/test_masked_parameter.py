"""One parameter with its mask: new masks, and whatever becomes of its data and state meanwhile."""

import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError

KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
def test_a_mask_may_lie_in_memory_in_any_way(device, frozen_state):
    pattern = torch.rand(64) < 0.5
    for mask in (pattern.repeat_interleave(2)[::2], torch.tensor([True]).expand(64), pattern.flip(0)):
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state=frozen_state)
        optimizer.set_mask(weight, mask)
        weight.grad = torch.ones(64)
        optimizer.step()
        assert torch.equal(weight.detach() != 0, mask)


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


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("shape", [(4, 3), (4, 1)])
@pytest.mark.parametrize(
    "strange", [torch.zeros(2), torch.zeros(400, 3), torch.zeros(4, 3, device="meta")], ids=str
)
def test_moments_that_do_not_belong_to_the_parameter_are_refused(frozen_state, shape, strange):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state=frozen_state)
    optimizer.set_mask(weight, (torch.arange(12).view(4, 3) % 2 == 0)[:, : shape[1]])
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"] = strange
    with pytest.raises(PolicyError, match=r"'exp_avg_sq'.*has the shape"):
        optimizer.step()
    if frozen_state == "drop":
        with pytest.raises(PolicyError, match=r"'exp_avg_sq'.*has the shape"):
            optimizer.set_mask(weight, None)


@pytest.mark.parametrize("frozen_state", ["zero", "drop"])
@pytest.mark.parametrize(("bias_correction", "count"), [("tensor", 3), ("entry", 0)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adamax])
def test_a_tensor_that_thaws_restarts_as_torch_does_with_its_count_or_with_none(
    kind, bias_correction, count, frozen_state
):
    weight = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    plain = torch.nn.Parameter(weight.detach().clone())
    optimizer, by_hand = (
        MaskedOptimizer(kind([weight], 0.1), frozen_state, bias_correction),
        kind([plain], 0.1),
    )
    for step in range(8):
        if step == 3:
            optimizer.set_mask(weight, torch.tensor(False))
        if step == 5:
            optimizer.set_mask(weight, None)
            for name, value in by_hand.state[plain].items():
                value.fill_(count if name == "step" else 0.0)
        weight.grad = torch.randn(4, dtype=torch.float64)
        plain.grad = weight.grad.clone() if step not in (3, 4) else None
        optimizer.step()
        by_hand.step()
        torch.testing.assert_close(weight, plain, rtol=0, atol=1e-12)
