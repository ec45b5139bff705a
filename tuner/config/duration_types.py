"""The value types of time: one duration, or a cadence of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.config.duration import Duration
from tuner.config.value_types import NEVER, ValueType, shown


@dataclass(frozen=True)
class Span(ValueType):
    """One duration in one of `units`."""

    metavar = "DURATION"
    units: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a duration ({' | '.join(self.units)})"

    def read(self, value: Any) -> Duration:
        """Return the duration."""
        if isinstance(value, Duration):
            value = str(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}, such as 10 {self.units[0]}")
        return Duration.parse(value, self.units)

    def plain(self, value: Any) -> Any:
        """Return the duration's text."""
        return None if value is None else str(value)

    def schema(self) -> dict[str, Any]:
        """A count and a unit."""
        return {"type": "string", "description": self.what, "pattern": r"^\S.*$"}


@dataclass(frozen=True)
class Cadence(Span):
    """One duration or a list of them, whichever comes first; `never` turns it off."""

    aliases: tuple[tuple[str, Any], ...] = NEVER

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a duration or a list of durations ({' | '.join(self.units)})"

    def read(self, value: Any) -> tuple[Duration, ...]:  # type: ignore[override]
        """Return the durations."""
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise ValueError("got an empty list; to turn it off write never")
        return tuple(Span(units=self.units).read(item) for item in items)

    def plain(self, value: Any) -> Any:
        """Return one text, or a list of them."""
        return str(value[0]) if len(value) == 1 else [str(item) for item in value]

    def schema(self) -> dict[str, Any]:
        """A duration or a list of durations."""
        one = {"type": "string", "pattern": r"^\S.*$"}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}], "description": self.what}
