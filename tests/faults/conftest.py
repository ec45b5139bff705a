"""No fault without the kernel's help."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bench import Bench, fork_server, scratch
from tests.faults.notify import unavailable
from tests.fixtures import forked

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A tiny adapter's jobs, done once unbroken."""
    forked.start_servers()  # a server that a supervised child starts is waited for, and never ends
    with fork_server(), scratch() as directory:
        made = Bench(directory, "lora")
        made.set_up()
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, and say why, where system calls cannot be told to the parent."""
    reason = unavailable()
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
