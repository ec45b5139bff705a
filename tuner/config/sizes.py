"""The leaf type of a size in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.config.leaves import Leaf, shown
from tuner.config.numbers import byte_text, parse_bytes


@dataclass(frozen=True)
class Bytes(Leaf):
    """A whole number of bytes, such as 5GB or 4GiB."""

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return "a size such as 5GB, 500MB or 4GiB"

    def read(self, value: Any) -> int:
        """Return the bytes."""
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise TypeError
        try:
            return parse_bytes(value)
        except ValueError:
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}") from None

    def plain(self, value: Any) -> Any:
        """Return the shortest text that says it exactly."""
        return byte_text(value)

    def schema(self) -> dict[str, Any]:
        """A count, or a count and a unit."""
        return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[\d.].*$"}]}
