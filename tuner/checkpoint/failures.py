"""Failures of ranks while they save or load together."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from tuner.runtime.process import Collective, describe


def first_failure(error: CheckpointException, ranks: Collective) -> Exception:
    """The first failing rank's exception out of DCP's collection of them; it names its rank if there are several."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if ranks.size > 1:
        return describe(rank, cause).exception()
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))
