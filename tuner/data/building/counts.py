"""What became of records and conversations, counted."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """What became of records: of one block, one source or one split."""

    records: int = 0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def sum(counts: "Iterable[Counts]") -> "Counts":
        """All of them together."""
        total = Counts()
        for each in counts:
            total.add(each)
        return total

    def add(self, other: "Counts") -> None:
        """Count what `other` counted too."""
        self.records += other.records
        self.documents += other.documents
        self.skipped.update(other.skipped)
        self.dropped.update(other.dropped)


@dataclass
class ByAnswer:
    """Conversations of which each answer is a document of its own, since no one text of them has exact masks."""

    chats: int = 0
    documents: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> answers of these conversations that have no document."""

    @staticmethod
    def sum(counts: "Iterable[ByAnswer]") -> "ByAnswer":
        """All of them together."""
        total = ByAnswer()
        for each in counts:
            total.add(each)
        return total

    def add(self, other: "ByAnswer") -> None:
        """Count what `other` counted too."""
        self.chats += other.chats
        self.documents += other.documents
        self.left_out.update(other.left_out)

    def report(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {"chats": self.chats, "documents": self.documents, "left_out": dict(sorted(self.left_out.items()))}
