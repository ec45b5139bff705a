"""What it costs, in words, that the documents of a row do not lie end to end."""

import numpy as np

from tuner.data.prepared import PackedRows
from tuner.model.apart import computed_tokens, forwards_of
from tuner.setup.resolve import Resolved
from tuner.setup.settled import rows_at_once

_LOOKED_AT = 256
"""Micro-batches that stand for all."""


def packing_line(resolved: Resolved, rows: PackedRows) -> str:
    """How documents go through the model, why, and what is computed more than for documents end to end."""
    n_rows = rows_at_once(resolved.recipe)
    starts = np.unique(np.linspace(0, max(0, len(rows) - n_rows), _LOOKED_AT).astype(int))
    tokens = computed = calls = 0
    for start in starts:
        chosen = range(int(start), min(int(start) + n_rows, len(rows)))
        lengths = [int(length) for i in chosen for length in rows.row(i).lengths]
        forwards = forwards_of(lengths, resolved.route)
        tokens, calls = tokens + sum(lengths), calls + len(forwards)
        computed += computed_tokens(lengths, forwards)
    cost = f"{calls / len(starts):.1f} forwards a micro-batch, compiled layers off"
    if resolved.route == "batch":
        cost = f"{1 - tokens / computed:.0%} padding, {cost}"
    return f"{resolved.reasons['packing']}; {cost}"
