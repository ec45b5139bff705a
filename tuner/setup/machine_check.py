"""One thing that was looked at on a machine: what was found, what that means, and how to get the rest."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "missing", "warning", "broken"]
GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing: what was found, what that means, and how to get the rest; ``broken`` is something that is needed."""

    name: str
    status: Status
    found: str
    means: str = ""
    fix: str = ""


def gib(count: int) -> str:
    """Bytes for people, always in one unit."""
    return f"{count / GIB:,.1f} GiB"
