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

from importlib import import_module  # noqa: E402
from types import ModuleType  # noqa: E402

from tuner.runtime.before_torch import prepare_environment  # noqa: E402

TYPE_CHECKING = False  # `typing` takes many times longer to import than this file
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Ladder", "check_recipe", "doctor", "evaluate", "export_gguf", "export_hf", "fit", "generate", "load_generator",
    "load_recipe", "prepare_data", "profile", "prove", "push", "resume", "runs", "score_tasks", "show_run", "train",
    "verify_resume",
]  # fmt: skip

if TYPE_CHECKING:
    from tuner.api.answers import generate, load_generator
    from tuner.api.checks import check_recipe, doctor
    from tuner.api.exports import export_hf, push
    from tuner.api.gguf_files import export_gguf
    from tuner.api.instruments import fit, profile, prove, verify_resume
    from tuner.api.ladders import Ladder
    from tuner.api.runs import runs, show_run
    from tuner.api.scores import evaluate, score_tasks
    from tuner.api.training import prepare_data, resume, train
    from tuner.config.load import load_recipe

_PLACES = {
    "tuner.api.answers": ("generate", "load_generator"),
    "tuner.api.checks": ("check_recipe", "doctor"),
    "tuner.api.exports": ("export_hf", "push"),
    "tuner.api.gguf_files": ("export_gguf",),
    "tuner.api.instruments": ("fit", "profile", "prove", "verify_resume"),
    "tuner.api.ladders": ("Ladder",),
    "tuner.api.runs": ("runs", "show_run"),
    "tuner.api.scores": ("evaluate", "score_tasks"),
    "tuner.api.training": ("prepare_data", "resume", "train"),
    "tuner.config.load": ("load_recipe",),
}
"""The functions of the Python API by their modules, of which each is imported when one of its functions is first used.
"""


def __getattr__(name: str) -> object:
    """Import a function of the Python API on first use, so that `import tuner` stays cheap."""
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module 'tuner' has no attribute '{name}'; it has {', '.join(__all__)}")
    prepare_environment(os.environ)  # before torch is imported, which most of them load
    return getattr(import_module(place), name)


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
        function: Any = __getattr__(self.__name__.rpartition(".")[2])
        return function(*args, **options)


sys.modules[__name__].__class__ = _Package
