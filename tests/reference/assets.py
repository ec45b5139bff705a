"""Where the fetched files are; a test whose file is missing skips on a bare checkout and fails under `make test`."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TOKENIZERS = ("smollm2", "qwen3", "llama3")


def asset(name: str) -> Path:
    """Directory of an asset of tools/fetch_assets.py, or of the base model by the name `smollm2`."""
    root = os.environ.get("TUNER_TEST_ASSETS")
    base = os.environ.get("TUNER_TEST_SMOLLM2")
    path = base if name == "smollm2" else root and str(Path(root, name))
    if path and Path(path).is_dir():
        return Path(path)
    said = f"no {name} at {path}" if path else f"TUNER_TEST_{'SMOLLM2' if name == 'smollm2' else 'ASSETS'} is not set"
    if root:
        pytest.fail(f"{said}, and TUNER_TEST_ASSETS says that the files are here: python -m tools.fetch_assets DIR")
    pytest.skip(f"{said}: see tools/fetch_assets.py")


@cache
def tokenizer(directory: Path) -> Any:
    """Load transformers' own tokenizer of a directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
