"""Fine-tune and pre-train language models from one typed recipe."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["export_hf", "load_recipe", "prepare_data", "train"]

if TYPE_CHECKING:
    from tuner.api import export_hf, load_recipe, prepare_data, train


def __getattr__(name: str) -> object:
    """Import the Python API on first use, so that `import tuner` stays cheap."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("tuner.api"), name)
    raise AttributeError(f"module 'tuner' has no attribute '{name}'")


class _Package(ModuleType):
    """`tuner.train` is a function and a package: importing the package binds its module here, which stays callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _TrainPackage
        super().__setattr__(name, value)


class _TrainPackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from tuner.api import train as train_recipe

        return train_recipe(*args, **options)


sys.modules[__name__].__class__ = _Package
