"""Caches of tests: private, but for what transformers makes of tokenizers, which takes a second to ask."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = "TUNER_TEST_TOKENIZERS"
"""The variable that names the directory of those answers, one for all tests and their processes."""


def new_cache(directory: Path) -> Path:
    """A cache directory without prepared data."""
    directory.mkdir(parents=True, exist_ok=True)
    shared = os.environ.get(SHARED)
    if shared and not (directory / "tokenizers").exists():
        (directory / "tokenizers").symlink_to(shared)
    return directory
