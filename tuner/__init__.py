"""Fine-tune and pre-train language models from one typed recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["export_hf", "load_recipe", "prepare_data", "train"]

if TYPE_CHECKING:
    from tuner.config.load import load_recipe as load_recipe


def __getattr__(name: str) -> object:
    """Import the Python API on first use, so that `import tuner` stays cheap."""
    if name == "load_recipe":
        from tuner.config.load import load_recipe as load

        return load
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("tuner.api"), name)
    raise AttributeError(f"module 'tuner' has no attribute '{name}'")
