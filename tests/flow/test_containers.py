"""Tensors in tuples, lists, dicts and dataclasses."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch

from gradpolicy.flow.containers import map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    value: torch.Tensor
    parts: list = field(default_factory=list)
    made: list = field(default_factory=list, init=False)

    def __post_init__(self):
        self.made.append(self.value)


def doubled(tensor):
    return 2 * tensor


def test_every_tensor_is_replaced_and_everything_else_stays():
    one, two = torch.tensor(1.0), torch.tensor(2)
    given = {"pair": Pair(one, "a"), "more": OrderedDict(x=[two, (one, None)])}
    found = map_tensors(doubled, given)
    assert found == {"pair": Pair(2.0, "a"), "more": OrderedDict(x=[4, (2.0, None)])}
    assert type(found["more"]) is OrderedDict
    assert tensors_in(given) == [one, two, one]
    assert given["pair"].left is one


def test_a_container_without_such_tensors_is_returned_itself():
    cache, given = [torch.tensor(1)], {"labels": torch.tensor([1])}
    found = map_tensors(doubled, (given, cache, torch.tensor(1.0)), where=torch.is_floating_point)
    assert found[0] is given
    assert found[1] is cache
    assert found[2] == 2.0


def test_a_dataclass_is_rebuilt_without_running_its_constructor():
    given = Output(torch.tensor(1.0), [torch.tensor(2.0)])
    found = map_tensors(doubled, given)
    assert (found.value, found.parts, found.made) == (2.0, [4.0], [2.0])
    assert (given.value, given.parts) == (1.0, [2.0])
