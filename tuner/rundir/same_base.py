"""Whether the base model is still the one that a checkpoint's run had."""

from collections.abc import Mapping
from typing import Any

from tuner.checkpoint.open import CheckpointInfo
from tuner.errors import DataError


def require_same_base(info: CheckpointInfo, frozen_hash: str | None) -> None:
    """Check that the weights that were not trained are still those of the checkpoint's run. Raises DataError."""
    noted = info.meta.get("frozen_hash")
    if noted != frozen_hash:
        given = (info.meta.get("init_from") or {}).get("entries", ())
        raise DataError(
            f"{info.path}: the base model changed since this checkpoint was saved ({noted} -> {frozen_hash})",
            hint="restore it, or name its commit: model.revision"
            + (f"; or restore what model.init_from gave: {', '.join(one['path'] for one in given)}" if given else ""),
        )


def require_same_quantizer(info: CheckpointInfo, quantizer: Mapping[str, Any] | None) -> None:
    """Check that what made codes of the base is what did so in the checkpoint's run. Raises DataError."""
    noted = info.meta.get("quantizer")
    if noted != quantizer:
        raise DataError(
            f"{info.path}: the base was quantised otherwise when this checkpoint was saved ({noted} -> {quantizer})",
            hint="take the version of tuner that saved it, or start a new run with --name",
        )
