"""Lists in the documentation are those of the package's tables."""

import pytest

from lists import LISTS, page_with


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_that_of_its_table(name):
    path, text = page_with(name)
    assert path.read_text() == text, f"{path.name} lists other {name}: run python scripts/lists.py"
