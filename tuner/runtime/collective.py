"""Ranks that fail together: an exception on one is raised on all, with the rank's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.errors import MemoryLimitError, TunerError
from tuner.runtime.process import any_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What a rank tells the others about its exception."""

    rank: int
    kind: type[TunerError] | None
    text: str
    hint: str | None

    def exception(self) -> Exception:
        """The exception to raise elsewhere; one that is not the user's to mend becomes a RuntimeError."""
        text = f"rank {self.rank}: {self.text}"
        return RuntimeError(text) if self.kind is None else self.kind(text, self.hint)


def describe(rank: int, error: BaseException) -> Failure:
    """The failure of `rank` in words that survive the wire."""
    if isinstance(error, TunerError):
        return Failure(rank, type(error), error.message, error.hint)
    if isinstance(error, MemoryError):
        return Failure(rank, MemoryLimitError, "out of memory", None)
    return Failure(rank, None, f"{type(error).__name__}: {error}", None)


class Collective:
    """All ranks of a group, or the only process when `group` is None. Every method is collective."""

    def __init__(self, group: ProcessGroup | None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns all results in rank order. Raises the first rank's exception everywhere."""
        if self.group is None:
            return [work()]
        import torch.distributed as dist

        error: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - told to every rank, then raised
            error = raised
        failed = any_rank(error is not None, self.group)
        mine: Any = None if error is None else describe(self.rank, error)
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine if failed else result, group=self.group)
        if failed:
            first = next(answer for answer in answers if isinstance(answer, Failure))
            raise first.exception() from error
        return answers

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone; every rank gets its result, or its exception."""
        return self.on_all_ranks(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]
