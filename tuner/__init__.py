"""Fine-tune and pre-train language models from one typed recipe."""

from __future__ import annotations

import os
import sys


def _is_the_program() -> bool:
    """Whether this is imported by `tuner` or `python -m tuner`, and not by a program or a notebook that uses it."""
    words = getattr(sys, "argv", [])
    if words[:1] == ["-m"]:  # as long as Python looks for the module to run
        return sys.orig_argv[-len(words)] in {"tuner", "-mtuner"}
    return bool(words) and words[0].rpartition("/")[2] == "tuner"


def _leave(number: int, frame: object) -> None:
    """Until a command has its own answer to signals (`tuner.runtime.stop`), nothing is there to be undone."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(130)


IS_PROGRAM = _is_the_program()
if IS_PROGRAM:
    # Before anything that takes time to load: Python's own answer to Ctrl-C is a traceback out of whatever was loading.
    import _signal  # type: ignore[import-not-found]

    for _number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGHUP):
        if _signal.getsignal(_number) != _signal.SIG_IGN:  # ignored by a shell's background job, or nohup
            _signal.signal(_number, _leave)

from types import ModuleType  # noqa: E402

TYPE_CHECKING = False  # `typing` takes many times longer to import than this file
if TYPE_CHECKING:
    from typing import Any

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
