"""No fault without the kernel's help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.notify import unavailable

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, and say why, where system calls cannot be told to the parent."""
    reason = unavailable()
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
