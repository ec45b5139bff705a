"""How fast a store directory publishes and fetches, against obstore's own puts and gets of the same bytes."""

from __future__ import annotations

from tools.commands import Results


def throughput(results: Results) -> int:
    return 0
