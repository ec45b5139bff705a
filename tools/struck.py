"""What strikes in a process of `tools/kill_campaign.py`: it dies, hears a signal, or its clock jumps, at a moment.

A module named `sitecustomize` calls :func:`arm`, in every process of a command, with what the environment says.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

VARIABLE = "STRUCK"


def arm() -> None:
    """Prepare this process to be struck, where it is the rank that is meant."""
    given = json.loads(os.environ.get(VARIABLE, "null"))
    if given is not None and given["rank"] in (-1, int(os.environ.get("RANK", "0"))):
        _ARMED[given["point"]](given)


def _counted(at: int, strike: Callable[[], None]) -> Callable[[], None]:
    """What is called at each moment, of which the one with this number strikes."""
    seen = [0]

    def moment() -> None:
        seen[0] += 1
        if seen[0] == at:
            strike()

    return moment


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _ask_to_stop() -> None:
    """As a scheduler does: the command, which started this rank, or is this process."""
    os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), signal.SIGTERM)


def _in_evaluation(given: dict[str, Any]) -> None:
    """Before a forward of an evaluation, or of a sample's answer."""
    task: Any = import_module("tuner.run.tasks.evaluate")

    moment, evaluate, answer = _counted(given["at"], _die), task.evaluate, task.answer_samples

    def struck(heed: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            moment()
            heed()

        return both

    def evaluated(*words: Any) -> Any:
        *before, heed, own = words
        return evaluate(*before, struck(heed), own)

    def answered(*words: Any) -> Any:
        *before, heed = words
        return answer(*before, struck(heed))

    task.evaluate, task.answer_samples = evaluated, answered


def _in_save(given: dict[str, Any]) -> None:
    """At a call of a save: in the thread that saves beside the steps, or in the save that steps wait for."""
    task: Any = import_module("tuner.run.tasks.save")

    strike = _die if given["point"] == "save" else _ask_to_stop
    moment, saving = _counted(given["at"], strike), threading.local()
    real = task.save

    def save(*words: Any, **options: Any) -> Any:
        saving.now = True
        try:
            return real(*words, **options)
        finally:
            saving.now = False

    def struck(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*words: Any, **options: Any) -> Any:
            if getattr(saving, "now", False):
                moment()
            return call(*words, **options)

        return called

    task.save = save
    for name in ("open", "write", "fsync", "rename", "close"):
        setattr(os, name, struck(getattr(os, name)))


def _at_step(given: dict[str, Any]) -> None:
    """In place of a step; with a `jump`, the clock is another from some steps before on, by so many seconds."""
    loop: Any = import_module("tuner.train.loop")

    real, at, jump = loop.optimizer_step, given["at"], given.get("jump", 0)
    clock, clock_ns, local, universal = time.time, time.time_ns, time.localtime, time.gmtime

    def step(state: Any, index: int, *rest: Any) -> Any:
        if index == max(1, at - 3) and jump:
            time.time, time.time_ns = lambda: clock() + jump, lambda: clock_ns() + jump * 10**9
            time.gmtime = lambda seconds=None: universal(time.time() if seconds is None else seconds)
            time.localtime = lambda seconds=None: local(time.time() if seconds is None else seconds)
        if index == at:
            _die()
        return real(state, index, *rest)

    loop.optimizer_step = step


_ARMED: dict[str, Callable[[dict[str, Any]], None]] = {
    "evaluation": _in_evaluation, "save": _in_save, "signal": _in_save, "clock": _at_step,
    "step": _at_step, "fewer": _at_step,
}  # fmt: skip
