"""The reference pages say what the recipe's model says."""

import pytest

from tools import reference


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_page_is_current(name: str) -> None:
    assert reference.current(name) == reference.PAGES[name](), "run: python -m tools.reference"
