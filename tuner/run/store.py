"""A run in an object store: published after each save, in the background, and at the launch's end; and its ranks on
machines without a common disk: one state in all their stages, and whole saves.

Each machine has a stage of its own. Before a launch they are brought to one state; a save brings what the ranks of
other machines have written to the stage of rank 0, which alone is published.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import newest
from tuner.checkpoint.save import WriteShards
from tuner.checkpoint.shard_hash import read_bytes
from tuner.checkpoint.staging import Staged
from tuner.checkpoint.storage import WrittenFile, write_shards
from tuner.errors import MachineError, TunerError
from tuner.run.status import launches_of
from tuner.rundir.directory import RunDir
from tuner.rundir.in_store import Say, bring, bring_exactly, not_published, opened, publish
from tuner.rundir.layout import CHECKPOINTS
from tuner.rundir.run_json import hold
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import discard_dir, machine_errors, make_dirs, write_all
from tuner.runtime.files import opened as opened_file
from tuner.runtime.process import Collective, gloo_group, process_group
from tuner.stores.stage import StageState
from tuner.train.tasks import Event, Request, Task

if TYPE_CHECKING:
    from tuner.stores.transfer import StageSnapshot


STEP = "step"
"""What a commit notes of a run: after which step it was taken."""


class Publisher(Task):
    """Publishes a run's stage after each save in the background, the newest state first; a context manager, in which
    the run's lease is held.

    What fails is a warning while training continues: the next save publishes all of it. Entering raises MachineError
    where another launch has the run.
    """

    def __init__(self, stage: Path, console: Console) -> None:
        self._stage, self._console, self._store = stage, console, opened(stage)
        self._lease = self._store.lease(stage, True, lambda text: console.say("store", text))
        self._pool = ThreadPoolExecutor(1, "store")
        self._next: tuple[StageSnapshot, Future[None]] | None = None

    def request(self) -> Request:
        """To stop, once another launch has taken the run over."""
        return Request.NONE if self._lease.taken_by is None else Request.STOP

    def notify(self, event: Event) -> None:
        """Publish the run as it is after a save. One that still waits gives way."""
        if event.stage != "save":
            return
        try:
            taken = self._store.snapshot(self._stage, {STEP: event.step})
        except TunerError as failed:
            self._console.warn(f"not published: {failed.message}; training continues")
            return
        self._give_way()
        self._next = taken, self._pool.submit(self._publish, taken)

    def __enter__(self) -> Publisher:
        self._lease.__enter__()
        try:
            self._store.require_based(self._stage)
            self._store.collect()
        except BaseException:
            self._lease.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._give_way()
            if error is None:
                self._publish_end()
            elif isinstance(error, Exception):  # how it failed is a part of the run; that error is the one to show
                with suppress(TunerError):
                    self._publish_end()
        finally:
            self._pool.shutdown(wait=False)
            self._lease.__exit__(kind, error, trace)

    def _publish_end(self) -> None:
        """Publish the run as the launch leaves it, once what is on its way is done. Raises MachineError."""
        with self._console.doing("publishing the run"):
            self._pool.shutdown()
            self._give_way()
            try:
                self._store.publish(self._store.snapshot(self._stage, {}))
            except MachineError as error:
                raise not_published(self._stage, error) from error

    def _give_way(self) -> None:
        """Have what waits yield to a newer state. Raises what was no error of a store in what is done."""
        if self._next is not None:
            taken, future = self._next
            if future.cancel():
                taken.close()
            elif future.done():
                future.result()

    def _publish(self, taken: StageSnapshot) -> None:
        try:
            self._store.publish(taken)
        except TunerError as failed:
            self._console.warn(f"not published: {failed.message}; training continues")


LONGEST_S = 24 * 3600.0
"""How long processes wait for one that fetches or publishes a run."""
CHUNK_BYTES = 64 << 20
"""Of a file on its way to rank 0, in memory on both ends. All ranks agree after each: no large file lets those that
wait for it run into the time-out of their group, and what fails on one end ends the save on all."""


def bring_to_all(run_dir: Path, rank_info: RankInfo, timeout_s: float, say: Say) -> None:
    """Fetch a run for the processes that a launcher has started on several machines, which have no group yet.

    Where they see one stage, each fetches as one process does; they meet within `timeout_s` seconds. Collective; raises
    MachineError on all.
    """
    with process_group(rank_info, "cpu", timeout_s):
        disks = disks_of(run_dir, Collective(gloo_group()))
    if not any(disks):
        bring(run_dir, say)
        return
    with process_group(rank_info, "cpu", LONGEST_S):
        settle(run_dir, disks, Collective(gloo_group()), say)


def disks_of(run_dir: Path, ranks: Collective) -> list[int]:
    """For each rank the first one on whose disk its stage lies, by a file that each rank puts next to its own.

    Collective; raises MachineError on all.
    """
    own = run_dir.with_name(f".{run_dir.name}.seen-{secrets.token_hex(16)}")

    def put() -> str:
        make_dirs(own.parent)
        with machine_errors(own):
            own.touch(exist_ok=False)
        return own.name

    try:
        names = ranks.on_all_ranks(put)
        # By its name, which this machine has never looked for: listings of a shared file system may be old.
        return ranks.on_all_ranks(lambda: next(i for i, name in enumerate(names) if own.with_name(name).exists()))
    finally:
        own.unlink(missing_ok=True)


def settle(run_dir: Path, disks: Sequence[int], ranks: Collective, say: Say) -> None:
    """Have one state of a run in the stages of all `disks`: the newest of those that are in step with the store, which
    is published first, else the store's. What only another stage has is set aside. Collective; raises on all.
    """
    leads = disks[ranks.rank] == ranks.rank
    standings = ranks.on_all_ranks(lambda: standing(run_dir) if leads else (False, 0, 0))
    chosen = max(range(ranks.size), key=standings.__getitem__)

    def decide() -> None:
        if ranks.rank == chosen:
            bring(run_dir, say)
            publish(run_dir)

    def follow() -> str | None:
        if not leads:
            return None
        run = RunDir(run_dir)
        make_dirs(run_dir)
        with hold(run_dir):
            said = None if ranks.rank == chosen else bring_exactly(run_dir)
            run.sweep()  # what a launch that was killed has not carried to rank 0
        make_dirs(run.logs)
        return said

    ranks.together(decide)
    for said in filter(None, ranks.on_all_ranks(follow)):
        say("store", said)


def standing(run_dir: Path) -> tuple[bool, int, int]:
    """How new a stage is: whether it is in step with its store, the step of its last checkpoint, its launches."""
    commit, known = opened(run_dir).newest(), StageState.read(run_dir).commit_id
    saved = newest(run_dir / CHECKPOINTS, verify=False)
    is_in_step = (known or None) == (None if commit is None else commit.commit_id)
    return is_in_step, 0 if saved is None else saved.step, len(launches_of(run_dir))


def writer(stage: Path, rank_info: RankInfo) -> WriteShards:
    """How the ranks of a stored run write a save: all into one directory, or each to its own machine's. Collective."""
    if rank_info.world_size == rank_info.local_world_size:
        return write_shards
    away = [rank for rank, disk in enumerate(disks_of(stage, Collective(gloo_group()))) if disk]
    return partial(write_apart, away) if away else write_shards


def write_apart(
    away: Sequence[int], directory: Path, tensors: Mapping[str, torch.Tensor], staged: Staged | None, ranks: Collective
) -> list[WrittenFile]:
    """`write_shards`, but that the ranks `away` do not see rank 0's directory: each writes to one of its own machine,
    from which its file is brought. Checkpoints that rank 0 has pruned go there, too. Collective.
    """
    is_away = ranks.rank in away

    def prune() -> None:
        for _, path in step_dirs(directory.parent) if is_away else ():
            if path.name not in kept:
                discard_dir(path)

    try:
        ranks.together(lambda: make_dirs(directory) if is_away else None)
        written = write_shards(directory, tensors, staged, ranks)
        sizes = ranks.on_rank0(lambda: [(rank, written[rank].name, written[rank].size) for rank in away])
        for source, name, size in sizes:
            for start in range(0, size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, size - start)
                ranks.together(partial(_carry, directory / name, source, start, length, ranks))
        kept = ranks.on_rank0(lambda: os.listdir(directory.parent))
        ranks.together(prune)
    finally:
        if is_away:
            with suppress(TunerError):  # what is left of it is swept at the next launch
                discard_dir(directory)
    return written


def _carry(path: Path, source: int, start: int, length: int, ranks: Collective) -> None:
    """Bytes of a file from rank `source` to rank 0. Both finish the exchange before one raises: the other waits there.
    """
    if ranks.rank not in (0, source):
        return
    data = torch.empty(length, dtype=torch.uint8)
    if ranks.rank == 0:
        dist.recv(data, group=ranks.group, group_src=source)
        with machine_errors(path), opened_file(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
            os.lseek(descriptor, start, os.SEEK_SET)
            write_all(descriptor, data.numpy().data)
        return
    try:
        read_bytes(path, start, data.numpy().data)
    finally:
        dist.send(data, group=ranks.group, group_dst=0)
