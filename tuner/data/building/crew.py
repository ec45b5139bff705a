"""The processes of a crew: one fresh interpreter loads what all of them need, and divides into as many as are asked.

That first process (`worker.py`) shares sockets with this one and nothing else: it inherits no lock, thread or open
file, imports no user script, and is in no terminal's foreground group, so that Ctrl-C reaches this process alone. It
tells how the others end. When this process ends, however it ends, the sockets close and all of them exit.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

END_S = 5.0
"""Seconds that processes have to end after their sockets closed, before they are killed."""
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # pyarrow's allocator would start a thread: a process with two is better not divided.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class Crew:
    """`count` processes that do a job, which can be pickled; as a context manager it ends them, at once after an error.

    They load the job from the moment on that the crew is made. OSError where they cannot be started.
    """

    def __init__(self, job: object, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count + 1)]
        theirs = [pair[1] for pair in pairs]
        try:
            # In a file, which waits for its reader: a socket would hold this process up until there is one.
            with tempfile.TemporaryFile() as told:
                told.write(ForkingPickler.dumps(job))
                told.seek(0)
                command = [sys.executable, "-m", "tuner.data.building.worker", *(str(one.fileno()) for one in theirs)]
                self._first = subprocess.Popen(
                    command,
                    stdin=told,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[one.fileno() for one in theirs],
                    process_group=0,
                )
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for one in theirs:
                one.close()
        connections: list[Connection[Any, Any]] = [Connection(ours.detach()) for ours, _ in pairs]
        self._ends = connections[0]
        self._codes: dict[int, int] = {}
        self.connections = connections[1:]
        """One for each process."""

    def exit_code(self, worker: int) -> int:
        """How a process ended whose connection closed; a signal is negative. All are killed where it does not end."""
        try:
            while worker not in self._codes:
                if not self._ends.poll(END_S):
                    self._kill()
                number, code = self._ends.recv()
                self._codes[number] = code
        except (EOFError, OSError):  # who would have told is gone itself, before they were divided or after
            return self._ended()
        return self._codes[worker]

    def end(self, at_once: bool) -> None:
        """End the processes that still run: as soon as they look at their connections, or without that."""
        for connection in self.connections:
            connection.close()
        if at_once:
            self._kill()
        self._ended()
        self._ends.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(at_once=kind is not None)

    def _ended(self) -> int:
        try:
            return self._first.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._first.wait()

    def _kill(self) -> None:
        # The first process is not waited for yet, so that its number still names the group of all.
        if self._first.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._first.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """The environment of a worker: this process's module path, without the directory it happens to be in."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *(entry for entry in sys.path if entry and entry != root)])
    return {**os.environ, **_QUIET, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
