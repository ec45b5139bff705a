"""A message to a webhook at the end of a launch: what goes wrong with it is a warning, and changes nothing."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tuner import __version__
from tuner.config.recipe import Ending, NotifySection
from tuner.config.value_types import address_problem
from tuner.errors import DivergedError, ExitCode, TunerError, as_tuner_error, first_line
from tuner.run.options import RunResult
from tuner.run.status import launches_of
from tuner.runtime.console import Console

SCHEMA_VERSION = 1
MOST_CHARACTERS = 500
"""Of an error's text: a longer one is cut."""
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class Webhook:
    """Sends one message when the block ends; ``ended`` says with what result, an exception how it failed."""

    def __init__(self, section: NotifySection, address: str, run_dir: Path, name: str | None, console: Console) -> None:
        self._section, self._address, self._console = section, address, console
        self._run_dir, self._name = run_dir, name or run_dir.name
        self._launches = len(launches_of(self._run_dir))
        self._started = time.monotonic()
        self._result: RunResult | None = None

    def ended(self, result: RunResult) -> None:
        """Take note of the launch's result."""
        self._result = result

    def __enter__(self) -> Webhook:
        if (problem := address_problem(self._address)) is not None:
            self._console.warn(f"notify: the webhook's address {problem}; nothing will be sent")
        return self

    def interrupted(self) -> None:
        """Send that a signal ends the process."""
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if address_problem(self._address) is not None:
            return
        if error is None and (self._result is None or len(launches_of(self._run_dir)) == self._launches):
            return  # a run that was finished already: nothing has happened
        known = None if error is None else as_tuner_error(error)
        if known is not None and isinstance(error, KeyboardInterrupt):
            known.exit_code = ExitCode.INTERRUPTED
        if (ending := _ending(known, self._result)) in self._section.events:
            message = self._message(ending, known)
            if (said := posted(self._address, message, self._section.timeout.seconds)) is not None:
                host = urlsplit(self._address).hostname
                self._console.warn(f"notify: {host} did not take the message ({ending}): {said}")

    def _message(self, ending: Ending, error: TunerError | None) -> dict[str, Any]:
        """The document that is sent; ``text`` is what chats show."""
        launches = launches_of(self._run_dir)
        last: Mapping[str, Any] = launches[-1] if len(launches) > self._launches else {}
        result = self._result
        metrics: Mapping[str, Any] = {} if result is None else result.metrics
        step = last.get("step") if result is None else result.step
        total = last.get("total_steps") if result is None else result.total_steps
        why = last.get("why") if error is None else _line(error)
        at = "" if step is None else f" at step {step:,}" + ("" if total is None else f" of {total:,}")
        return {
            "schema_version": SCHEMA_VERSION,
            "text": f"{self._name} {ending}{at}" + (f": {why}" if why else ""),
            "event": ending,
            "run": self._name,
            "run_dir": str(self._run_dir),
            "host": socket.gethostname(),
            "step": step,
            "total_steps": total,
            "saved_step": last.get("saved_step"),
            "loss": metrics.get("loss"),
            "eval_loss": metrics.get("eval_loss"),
            "seconds": round(time.monotonic() - self._started, 1),
            "exit_code": int(_EXIT_CODES[ending] if error is None else error.exit_code),
            "why": why,
            "hint": None if error is None else error.hint,
            "tuner": __version__,
        }


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message that is sent elsewhere arrives as a GET without its text, and an address may lead to any host."""

    def redirect_request(self, *given: Any) -> None:
        """Not followed: the answer is an error."""


def posted(address: str, document: Mapping[str, Any], seconds: float) -> str | None:
    """Post a document as JSON; what went wrong, in words that hold no part of the address, or None.

    It takes no longer than so many seconds, whatever the other side does: the thread that waits is abandoned.
    """
    body, problems = json.dumps(document).encode(), list[str | None]()
    thread = threading.Thread(target=lambda: problems.append(_post(address, body, seconds)), name="notify", daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[0] if problems else _no_answer(seconds)


def _post(address: str, body: bytes, seconds: float) -> str | None:
    headers = {"Content-Type": "application/json", "User-Agent": f"tuner/{__version__}"}
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds):
            return None  # what it answers is not read
    except urllib.error.HTTPError as error:
        error.close()
        moved = ": it leads elsewhere, which is not followed" if 300 <= error.code < 400 else ""
        return f"HTTP {error.code}{moved}"
    except Exception as error:  # noqa: BLE001 - a message is never the run's loss
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError) and reason.strerror is None:
            return _no_answer(seconds)  # the socket's own timeout, which may end just before the thread is abandoned
        return (reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else type(error).__name__


def _no_answer(seconds: float) -> str:
    return f"no answer in {seconds:g} s"


_EXIT_CODES: dict[Ending, ExitCode] = {"finished": ExitCode.OK, "stopped": ExitCode.STOPPED}
"""Of endings without an error."""
_STOPS = frozenset({ExitCode.STOPPED, ExitCode.INTERRUPTED})


def _ending(error: TunerError | None, result: RunResult | None) -> Ending:
    if isinstance(error, DivergedError):
        return "diverged"
    if error is not None or result is None:
        return "stopped" if error is not None and error.exit_code in _STOPS else "failed"
    return "finished" if result.status == "finished" else "stopped"


def _line(error: TunerError) -> str:
    """An error's first line, without passwords of URLs."""
    first = _USER_OF_URL.sub("***", first_line(error))
    return first if len(first) <= MOST_CHARACTERS else first[:MOST_CHARACTERS] + "…"
