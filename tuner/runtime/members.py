"""Who is in a list for the length of a block: observers, and what is undone or answered at its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def member(members: list[T], one: T) -> Iterator[None]:
    """Have ``one`` among ``members`` for the length of the block."""
    members.append(one)
    try:
        yield
    finally:
        members.remove(one)
