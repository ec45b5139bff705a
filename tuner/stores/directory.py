"""One directory in an object store: its newest commit, fetched to a local stage; the stage, published as the next one.

A commit is put under the number after the last one, only where nothing is yet, so that of two writers one fails.
Data are put before the commit that names them, and removed after the last commit that names them is gone: whoever reads
a commit and then its data finds them, or finds a newer commit.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tuner.errors import DataError, MachineError
from tuner.runtime.files import make_dirs
from tuner.runtime.lock import FileLock
from tuner.stores.client import Client, Version
from tuner.stores.commit import COMMITS, FILES, LEASE, Commit, StoredFile, commit_key, read_commit
from tuner.stores.stage import Bringing, StageState, entries, safe_link, state_path
from tuner.stores.transfer import SNAPSHOT_BYTES, GoneError, OpenFile, StageSnapshot, open_file, upload

KEPT_COMMITS = 2
"""The newest and the one before it, which a reader may be in the middle of."""
ATTEMPTS = 5
_NOTHING = Commit(0, "", "", {})
"""What stands for the commit of a directory that has none."""


class StoreDirectory:
    """A directory in a store. Methods raise MachineError with the URL, and DataError where what is stored is damaged.

    Names at the top of a stage that are in `local`, such as a lock, are neither published nor replaced by a fetch.
    Publishing needs the lease; reading does not.
    """

    def __init__(self, client: Client, local: Collection[str] = ()) -> None:
        self.url = client.url
        self.set_aside: Path | None = None
        """Where the last fetch has moved what was changed in the stage and is not of the commit."""
        self._client, self._local = client, frozenset(local)
        self._lease: Lease | None = None
        self._last: Commit | None = None
        """Under the lease: the commit that the next one follows."""
        self._snapshots: WeakSet[StageSnapshot] = WeakSet()
        self._mutex = threading.Lock()
        """Of the snapshots, which one thread takes while another publishes: it never waits for the store."""

    @classmethod
    def open(cls, url: str, local: Collection[str] = ()) -> StoreDirectory:
        """The directory of `s3://bucket/prefix`, `gs://...` or `az://...`; nothing is asked of the store yet."""
        return cls(Client.connect(url), local)

    def newest(self) -> Commit | None:
        """The newest commit, or None where nothing is published."""
        commit = self._head()
        return commit if commit is not None and commit.files else None

    def fetch(
        self, into: Path, only: Callable[[str], bool] | None = None, exact_but: str | None = None
    ) -> Commit | None:
        """Bring the stage `into` to the newest commit, which is returned; None where nothing is published.

        Where the stage is based on that commit already it is left as it is: it may be newer. Otherwise the store wins:
        files that differ are replaced, files that the commit does not have go, and what of them was changed here since
        it came from the store or went there is moved to :attr:`set_aside`. With `only` just the files (and every
        checkpoint with such a file) are brought of whose name it is true, and nothing else is touched. A directory with
        a manifest appears by one rename. A stage that a living writer of this machine has is his, and left as it is.

        With `exact_but` the store wins in any case, also one without a commit: that name at the stage's top alone keeps
        what the store does not have.
        """
        make_dirs(into.parent)
        self.set_aside, gone = None, GoneError("")
        with FileLock(state_path(into).with_suffix(".lock")):
            for _ in range(ATTEMPTS):
                commit = self.newest() or (None if exact_but is None else _NOTHING)
                if commit is None or (self._lease is None and lives_here(read_lease(self._client), into)):
                    return commit
                state = StageState.read(into)
                if state.commit_id == commit.commit_id and exact_but is None:
                    return commit
                bringing = Bringing(into, commit, state, self._local, exact_but)
                try:
                    bringing.bring(self._client, only)
                    return commit
                except GoneError as error:  # a newer commit has replaced it meanwhile
                    gone = error
                finally:
                    self.set_aside = bringing.aside or self.set_aside
        raise gone

    def lease(self, stage: Path, lock_is_free: bool, on_wait: Callable[[str], None] | None = None) -> Lease:
        """The right to publish here, as a context manager; see :class:`Lease`.

        Entered, it has put a commit of its own with the files of the last one: a put that an earlier writer may still
        have on its way fails from there on.
        """
        self._lease = Lease(self._client, stage, lock_is_free, on_wait, self._fence)
        return self._lease

    def snapshot(self, directory: Path, note: Mapping[str, Any], inside: tuple[str, ...] = ("",)) -> StageSnapshot:
        """The directory as it is now, for a later :meth:`publish`; what changed is opened or read, nothing is sent.

        After it a file may be appended to, replaced or removed. `note` goes into the commit. Files that are to be
        uploaded take a descriptor each, but the small ones. Names that begin with none of `inside` stay as the store
        has them.
        """
        with self._mutex:
            last = self._last or _NOTHING
            taken, room = StageSnapshot(directory, note, inside, last.data), SNAPSHOT_BYTES
            self._snapshots.add(taken)
        stored = last.files
        taken.kept |= {name: file for name, file in stored.items() if not name.startswith(inside)}
        state = StageState.read(directory)
        contents = last.contents
        try:
            for name, status in entries(directory, self._local, inside):
                if (directory / name).is_symlink():
                    taken.kept[name] = StoredFile(link=safe_link(str(directory), name, os.readlink(directory / name)))
                elif (sha256 := state.known(name, status)) in contents:
                    taken.kept[name] = contents[sha256 or ""]
                elif (file := open_file(directory / name, name, room)) is not None:
                    taken.opened.append(file)
                    room -= file.held
                    if name in stored and stored[name].size == file.size:
                        file.stored = stored[name]
        except BaseException:
            taken.close()
            raise
        return taken

    def publish(self, snapshot: StageSnapshot) -> Commit:
        """Upload what a snapshot has opened, commit it as the next number, and remove what only old commits named.

        Raises MachineError: the store then has no such commit, or has it and the answer was lost, which the next one
        finds out. What could not be removed is, after the next one.
        """
        try:
            lease, before = self._held(), self._last or _NOTHING
            state, contents = StageState.read(snapshot.directory), before.contents
            for file in snapshot.opened:  # an upload that ran when the snapshot was taken may have put it by now
                file.stored = contents.get(state.known(file.name, file.status) or "", file.stored)
            files = {**snapshot.kept, **upload(self._client, snapshot.opened)}
            commit = self._commit(lease, files, snapshot.note)
        finally:
            snapshot.close()
        if "" in snapshot.inside or state.commit_id == before.commit_id:
            state.commit_id = commit.commit_id
        for file in snapshot.opened:
            state.learn(file.name, file.status, files[file.name].sha256, file.looked)
        for name in state.files.keys() - files.keys():
            del state.files[name]
        state.write(snapshot.directory)
        with suppress(MachineError, DataError):
            self._prune(lease, commit)
        return commit

    def require_based(self, stage: Path) -> None:
        """Raise MachineError where the store has another commit than the one that the stage is based on."""
        commit = self._last or self._head()
        if commit is not None and commit.files and StageState.read(stage).commit_id != commit.commit_id:
            message = f"{self.url}: another launch has published there since this one fetched it"
            raise MachineError(message, hint="run the same command again")

    def differs(self, stage: Path, inside: tuple[str, ...] = ("",)) -> bool:
        """Whether a publish of the stage, which is based on the newest commit, would change any such name."""
        commit, state = self._last or self._head() or _NOTHING, StageState.read(stage)
        stored = {name: file for name, file in commit.files.items() if name.startswith(inside)}
        here = {name for name, _ in entries(stage, self._local, inside)}
        return here != stored.keys() or any(
            os.readlink(stage / name) != file.link if (stage / name).is_symlink()
            else state.sha256(stage, name) != file.sha256
            for name, file in stored.items()
        )  # fmt: skip

    def collect(self) -> int:
        """Remove data that no commit names, left by uploads that failed or were killed; how many objects."""
        lease = self._held()
        assert self._last is not None
        kept = self._prune(lease, self._last)
        orphans = [key for key in self._client.names(FILES) if key not in kept]
        lease.renew()  # what a later holder has put is not among what was listed before this
        self._client.delete(orphans)
        return len(orphans)

    def _held(self) -> Lease:
        if self._lease is None or self._last is None:
            raise RuntimeError(f"{self.url}: the lease was not taken")
        self._lease.check()
        return self._lease

    def _head(self) -> Commit | None:
        """The commit of the highest number.

        A listing may lag, so that it only says where to begin, as the lease does; the numbers after it are asked for by
        their keys, which never lag.
        """
        for attempt in range(ATTEMPTS):
            number = max([read_lease(self._client)["number"], *self._numbers()])
            while self._client.meta(commit_key(number + 1)) is not None:
                number += 1
            if number == 0:
                return None
            try:
                commit = read_commit(self._client, number)
            except DataError:  # some servers answer with less than they have, under load or while they remove it
                if attempt == ATTEMPTS - 1:
                    raise
                commit = None
            if commit is not None:  # else it was removed meanwhile: there are newer ones
                return commit
            time.sleep(0.1 * attempt)
        raise MachineError(f"{self.url}: its commit {number} is gone", hint="find out what removed it")

    def _numbers(self) -> set[int]:
        names = {Path(key).stem for key in self._client.names(COMMITS)}
        return {int(name) for name in names if name.isdecimal()}

    def _put(self, commit: Commit) -> bool:
        """Put a commit under its number; whether it is there, and not another's."""
        document = commit.document()
        found = self._client.settle(commit_key(commit.number), document, None)
        return found is not None and found[0] == document

    def _fence(self) -> None:
        """Put the last commit again under the next number; where one comes in between, that one."""
        assert self._lease is not None
        for _ in range(ATTEMPTS):
            last = self._head() or Commit(0, str(uuid.uuid4()), "", {})
            fence = Commit(last.number + 1, last.commit_id, self._lease.owner, last.files, last.note)
            if self._put(fence):
                self._last = fence
                self._lease.renew(fence.number)
                return
        raise MachineError(f"{self.url}: others publish here all the time", hint="choose another directory")

    def _commit(self, lease: Lease, files: Mapping[str, StoredFile], note: Mapping[str, Any]) -> Commit:
        """Put the next commit. Another's under its number is one that was on its way, as long as the lease is held.

        A number is given away once only while its commit is there: a later holder of the lease removes old ones. So the
        lease is renewed after the put, which is done only where no other has taken it before.
        """
        assert self._last is not None
        number = self._last.number
        for _ in range(ATTEMPTS):
            number += 1
            commit = Commit(number, str(uuid.uuid4()), lease.owner, files, note)
            there = self._put(commit)
            lease.renew(number if there else None)
            if there:
                self._last = commit
                return commit
        raise MachineError(f"{self.url}: others publish here all the time", hint="choose another directory")

    def _prune(self, lease: Lease, newest: Commit) -> set[str]:
        """Remove the commits but the newest two, then the data that only they named; the keys that are named still.

        Raises MachineError where the lease was lost meanwhile: a later holder's commits are not among what was read.
        """
        numbers = sorted(self._numbers() | {newest.number})
        kept = set(newest.data)
        with self._mutex:  # one that is made after this is based on one of the newest two
            kept = kept.union(*(snapshot.base for snapshot in self._snapshots if not snapshot.closed))
        for number in numbers[-KEPT_COMMITS:]:
            commit = newest if number == newest.number else read_commit(self._client, number)
            kept |= set() if commit is None else commit.data
        named: set[str] = set()
        for number in numbers[:-KEPT_COMMITS]:
            with suppress(DataError):  # a damaged listing goes; its data are found when orphans are
                commit = read_commit(self._client, number)
                named |= set() if commit is None else commit.data
        if len(numbers) > KEPT_COMMITS:
            lease.renew()
        self._client.delete([commit_key(number) for number in numbers[:-KEPT_COMMITS]])
        self._client.delete(sorted(named - kept))
        return kept


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

    It is one object, renewed over its last version, so that the store decides, and no two clocks are compared. Who
    finds another's lease waits until it has not been renewed for :data:`TTL_SECONDS` of his own monotonic clock, and
    takes it then; one whose process was on this machine and is gone (its lock on the stage is free) is taken at once.
    Two writers are kept apart by the numbers of commits, of which the store gives each away once while its commit is
    there; and since old commits are removed, by a renewal after each put, which fails once another has the lease.

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
        self._client, self._place, self._lock_is_free = client, place_of(stage), lock_is_free
        self._on_wait, self._on_taken = on_wait, on_taken
        self._mutex, self._stop = threading.Lock(), threading.Event()
        self._epoch = self._beat = 0
        self._version: Version | None = None
        self._document = b""
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
                    self._client.require_conditions(LEASE, self._document, version)
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
        self._document = json.dumps(facts, sort_keys=True).encode()
        found = self._client.settle(LEASE, self._document, version)
        if found is None or found[0] != self._document:
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


def find_entry(client: Client) -> Commit | None:
    """The one commit of a directory that never changes; None where it is not published. Raises as :func:`read_commit`.
    """
    return read_commit(client, 1)


def publish_entry(client: Client, files: Iterable[OpenFile], note: Mapping[str, Any]) -> Commit:
    """Publish a directory that never changes, once, under no lease: the commit that is there then, own or another's.

    It has one commit, number 1, put only where none is. Who makes the same thing at the same time, on any machine,
    finds that commit in place of his own, and removes what he has uploaded. Raises MachineError, DataError.
    """
    document = Commit(1, str(uuid.uuid4()), "", upload(client, files), note).document()
    there = client.settle(commit_key(1), document, None)
    assert there is not None, "an object that is wanted where none is, is there in the end"
    commit = Commit.read(f"{client.url}/{commit_key(1)}", there[0])
    client.delete([key for key in client.names(FILES) if key not in commit.data])
    return commit
