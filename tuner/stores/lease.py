"""The right to publish in a store directory: one object, renewed over its last version, so that the store decides.

No two clocks are compared. Who finds another's lease waits until it has not been renewed for :data:`TTL_SECONDS` of
his own monotonic clock, and takes it then; one whose process was on this machine and is gone (its lock on the stage is
free) is taken at once. A lease is not what keeps two writers apart, only what tells them early: that is the number of
a commit, which the store gives away once.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuner.errors import MachineError
from tuner.stores.client import Client, Version
from tuner.stores.commit import LEASE

TTL_SECONDS = 60.0
RENEWALS = 4
"""How often in that time it is renewed."""


def process_of(pid: int) -> str:
    """A process by its id and when the machine started it, so that a later one of that id is another; else empty."""
    with suppress(OSError, IndexError):
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return ""


def place_of(stage: Path) -> str:
    """This machine since it was started, and the stage on it: where a lock that is free means that nobody trains."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {stage.absolute()}"
    return f"{socket.gethostname()} {stage.absolute()}"


class Lease:
    """A lease on the directory of a client, as a context manager: taken at the start, renewed by a thread, released.

    `lock_is_free` says that this process holds the stage's own lock, so that no other process of this machine has it.
    `on_wait` is called once, with a sentence, where another's lease has to run out first. Entering raises MachineError
    where another launch holds it and renews it.
    """

    def __init__(
        self,
        client: Client,
        stage: Path,
        lock_is_free: bool,
        on_wait: Callable[[str], None] | None = None,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner = str(uuid.uuid4())
        self.taken_by: str | None = None
        """Who has taken it over, once that is known."""
        self.number = 0
        """The highest commit that is known; whoever reads the lease need not list."""
        self._client = client
        self._place = place_of(stage)
        self._lock_is_free = lock_is_free
        self._on_wait = on_wait
        self._on_taken = on_taken
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._epoch = self._beat = 0
        self._version: Version | None = None
        self._thread = threading.Thread(target=self._renewing, name="store lease", daemon=True)

    def check(self) -> None:
        """Raise MachineError where another launch has taken the directory over."""
        if self.taken_by is not None:
            taken = f"another launch, {self.taken_by}, has taken {self._client.url} over"
            raise MachineError(taken, hint="what this one did is in its stage; let that one run, or stop it and resume")

    def renew(self, number: int | None = None) -> None:
        """Renew it now, with the number of a commit that was made. Raises MachineError where that cannot be done."""
        with self._mutex:
            self.check()
            self.number = self.number if number is None else number
            for _ in range(3):
                if self._put(self._version):
                    return
                # Another's; or a put of its own that was taken for failed; or none, since somebody removed it.
                document, self._version = self._client.get(LEASE) or (b"", None)
                facts = facts_of(document)
                if self._version is not None and facts["owner"] != self.owner:
                    self.taken_by = _holder(facts)
                    self.check()
        raise MachineError(f"{self._client.url}: its lease cannot be renewed")

    def __enter__(self) -> Lease:
        seen, since = b"", time.monotonic()
        while True:
            document, version = self._client.get(LEASE) or (b"", None)
            document, facts = document or b"-", facts_of(document)
            free = version is None or facts["released"] or (self._lock_is_free and facts["place"] == self._place)
            if free or (seen and time.monotonic() - since > TTL_SECONDS):
                self._epoch, self.number = facts["epoch"] + 1, facts["number"]
                if self._put(version):
                    break
            elif seen not in (b"", document):
                in_use = f"{self._client.url} is in use by another launch, {_holder(facts)}"
                raise MachineError(in_use, hint="wait for it, stop it, or choose another output_dir")
            elif not seen:
                seen, since = document, time.monotonic()
                if self._on_wait is not None:
                    self._on_wait(f"waiting up to {TTL_SECONDS:.0f} s for the lease of {_holder(facts)} to run out")
            if not free:
                time.sleep(TTL_SECONDS / 20)
        self._thread.start()
        try:
            self._on_taken()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.taken_by is None:
            with suppress(MachineError):  # it runs out by itself
                self._put(self._version, released=True)

    def _put(self, version: Version | None, released: bool = False) -> bool:
        """Put this lease over a version; whether it is there now."""
        self._beat += 1
        facts = {
            "owner": self.owner, "host": socket.gethostname(), "pid": os.getpid(), "process": process_of(os.getpid()),
            "place": self._place, "epoch": self._epoch, "beat": self._beat, "number": self.number,
            "released": released,
        }  # fmt: skip
        document = json.dumps(facts, sort_keys=True).encode()
        found = self._client.settle(LEASE, document, version)
        if found is None or found[0] != document:
            return False
        self._version = found[1]
        return True

    def _renewing(self) -> None:
        while not self._stop.wait(TTL_SECONDS / RENEWALS) and self.taken_by is None:
            with suppress(MachineError):  # a store that does not answer: the next one may do; a lost lease is kept
                self.renew()


def read_lease(client: Client) -> dict[str, Any]:
    """What the lease of a directory says, as :func:`facts_of` has it. Raises MachineError."""
    return facts_of((client.get(LEASE) or (b"", None))[0])


def lives_here(facts: dict[str, Any], stage: Path) -> bool:
    """Whether the lease's holder is a living process that has this very stage."""
    mine = facts["place"] == place_of(stage) and not facts["released"]
    return mine and process_of(int(facts["pid"])) == facts["process"]


def facts_of(document: bytes) -> dict[str, Any]:
    """What a lease says; one that is damaged says nothing, and runs out like any other."""
    facts: Any = None
    with suppress(ValueError):
        facts = json.loads(document)
    nothing = {"owner": "", "host": "unknown", "pid": 0, "process": "", "place": "", "epoch": 0, "number": 0}
    return {**nothing, "released": False, **(facts if isinstance(facts, dict) else {})}


def _holder(facts: dict[str, Any]) -> str:
    return f"{facts['host']} pid {facts['pid']}"
