"""Fine-tune and pre-train language models from one typed recipe."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "check_recipe", "doctor", "evaluate", "export_hf", "fit", "generate", "load_generator", "load_recipe",
    "prepare_data", "profile", "prove", "push", "resume", "runs", "score_tasks", "show_run", "train", "verify_resume",
]  # fmt: skip

if TYPE_CHECKING:
    from tuner.api import (
        check_recipe,
        doctor,
        evaluate,
        export_hf,
        fit,
        generate,
        load_generator,
        load_recipe,
        prepare_data,
        profile,
        prove,
        push,
        resume,
        runs,
        score_tasks,
        show_run,
        train,
        verify_resume,
    )


def __getattr__(name: str) -> object:
    """Import the Python API on first use, so that `import tuner` stays cheap."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("tuner.api"), name)
    raise AttributeError(f"module 'tuner' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    """What there is, though most of it is imported on first use."""
    return sorted({*__all__, "__version__", "errors"})


class _Package(ModuleType):
    """Some names, such as `tuner.train`, are functions and modules: these stay callable once they are bound."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from importlib import import_module

        return getattr(import_module("tuner.api"), self.__name__.rpartition(".")[2])(*args, **options)


sys.modules[__name__].__class__ = _Package
