import math

import pytest

from gradpolicy.checks import check_choice, check_flag, check_share, check_sizes, check_whole
from gradpolicy.errors import PolicyError


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, True, "4", None, [], 2**70])
def test_a_size_is_a_whole_number_above_0_and_no_larger_than_memory(value):
    with pytest.raises(PolicyError, match=r"^Net\.width: must be"):
        check_sizes("Net", depth=3, width=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, True, "half", None])
def test_a_share_lies_between_0_and_1(value):
    with pytest.raises(PolicyError, match=r"^Net\.dropout: must be a number between 0 and 1, got"):
        check_share("Net.dropout", value)


def test_what_is_right_is_given_back():
    assert (check_whole("n", 3, least=3), check_share("p", 1), check_flag("f", False)) == (3, 1.0, False)


@pytest.mark.parametrize("value", ["forwards", None, ["forward"], 1])
def test_a_choice_is_one_of_the_names(value):
    with pytest.raises(PolicyError, match=r"^Net\.order: unknown value .*'forward'"):
        check_choice("Net.order", value, ("forward", "reverse"))
    assert check_choice("Net.order", "reverse", {"forward": 1, "reverse": 2}) == "reverse"


def test_a_flag_is_no_number():
    with pytest.raises(PolicyError, match="must be True or False, got 1"):
        check_flag("log", 1)
