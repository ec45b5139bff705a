"""What became of records and conversations, counted."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self


class _Summed:
    """Counts that are added up field by field."""

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """All of them together."""
        total = cls()
        for each in counts:
            total.add(each)
        return total

    def add(self, other: Self) -> None:
        """Count what `other` counted too."""
        for one in fields(self):  # type: ignore[arg-type]  # of dataclasses only
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class Counts(_Summed):
    """What became of records: of one block, one source or one split."""

    records: int = 0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class ByAnswer(_Summed):
    """Conversations of which each answer is a document of its own, since no one text of them has exact masks."""

    chats: int = 0
    documents: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> answers of these conversations that have no document."""

    def report(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {"chats": self.chats, "documents": self.documents, "left_out": dict(sorted(self.left_out.items()))}
