import pytest
import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError


@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("shape", [(4, 3), (4, 1)])
@pytest.mark.parametrize(
    "strange", [torch.zeros(2), torch.zeros(400, 3), torch.zeros(4, 3, device="meta")], ids=str
)
def test_moments_that_do_not_belong_to_the_parameter_are_refused(frozen_state, shape, strange):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state=frozen_state)
    mask = (torch.arange(12).view(4, 3) % 2 == 0)[:, : shape[1]]
    optimizer.set_mask(weight, mask if shape[1] > 1 else torch.arange(4).view(4, 1) < 2)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"] = strange
    with pytest.raises(PolicyError, match=r"'exp_avg_sq'.*has the shape"):
        optimizer.step()
    if frozen_state == "drop":
        with pytest.raises(PolicyError, match=r"'exp_avg_sq'.*has the shape"):
            optimizer.set_mask(weight, None)


def test_what_a_user_keeps_beside_the_moments_is_left_alone():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state="drop")
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    optimizer.state[weight]["note"] = "mine"
    for mask in (torch.rand(4, 3) < 0.5, torch.rand(4, 3) < 0.5, None):
        optimizer.set_mask(weight, mask)
        optimizer.step()
    assert optimizer.state[weight]["note"] == "mine"
    assert optimizer.state[weight]["exp_avg"].shape == (4, 3)
