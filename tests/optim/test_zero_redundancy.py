import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.optim.zero_redundancy import as_masked


def test_an_optimizer_is_wrapped_once():
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    wrapped = as_masked(plain)
    assert isinstance(wrapped, MaskedOptimizer)
    assert wrapped.inner is plain
    assert as_masked(wrapped) is wrapped
