"""What made an artifact: package versions."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = (
    "tuner",
    "torch",
    "transformers",
    "peft",
    "liger-kernel",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
    "huggingface-hub",
    "pydantic",
    "datasets",
    "triton",
    "flash-attn",
    "bitsandbytes",
    "accelerate",
)


def versions() -> dict[str, str]:
    """Package name -> version of those that are installed, and `python`; imports none of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
