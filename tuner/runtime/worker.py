"""One rank among those that `tuner.runtime.spawn` started: where it writes, whom it watches, what it reports."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tuner.errors import ExitCode, as_tuner_error
from tuner.runtime import phase, stop
from tuner.runtime.activity import STDERR
from tuner.runtime.console import escape
from tuner.runtime.dist import log_name
from tuner.runtime.files import read_json, write_atomic
from tuner.runtime.spawn import JOB, RankReport, rank_file
from tuner.runtime.warned import Warned, collected

WATCH_S = 1.0


def main() -> NoReturn:
    """Do the work that the job in directory `sys.argv[1]` names, leave its result or its error as a report, and end.

    stdout carries nothing: it goes where stderr goes, which on every rank but the first is `logs/rankN.log`.
    SIGUSR2 writes the stack of every thread to the log. A rank whose parent is gone asks itself to stop.
    """
    stop.heed()
    stop.let_through()
    place, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job = read_json(place / JOB)
    log = _open_log(Path(job["logs"]), rank)
    phase.publish(rank_file(place, rank, "phase"))
    threading.Thread(target=_watch_parent, args=(int(job["parent"]),), daemon=True).start()
    try:
        silent = stop.answered(lambda: int(ExitCode.INTERRUPTED))  # whoever started it speaks for all
        with silent, collected(Warned(rank_file(place, rank, "warnings")), _say):
            module, _, function = job["work"].partition(":")
            with STDERR.doing(job["says"]) if rank == 0 and job["says"] else contextlib.nullcontext():
                work = getattr(import_module(module), function)
            result = work(job["job"])
        report = RankReport(rank, time.monotonic(), result=result)
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which reports it to the user
        at_s = time.monotonic()
        os.write(log, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
        known = as_tuner_error(error)
        code = int(ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else known.exit_code)
        message = known.message or type(error).__name__
        report = RankReport(rank, at_s, None, type(error).__name__, code, message, known.hint)
    write_atomic(rank_file(place, rank, "json"), json.dumps(dataclasses.asdict(report)).encode())
    if report.exit_code == 0:
        raise SystemExit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(report.exit_code)  # an orderly end may wait for a collective that nobody joins any more


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # its reader is gone
        print(escape(line), file=sys.stderr, flush=True)


def _open_log(logs: Path, rank: int) -> int:
    log = os.open(logs / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if rank != 0:
        os.dup2(log, 2)
    os.dup2(2, 1)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR2, log, all_threads=True)
    return log


def _watch_parent(parent: int) -> None:
    """Without the parent nobody passes signals on or reads the result: save and stop."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
