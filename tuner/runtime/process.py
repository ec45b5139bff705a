"""The process group of a run, and its ranks' agreement; a single process has neither and pays for neither.

Ranks fail together: an exception on one is raised on all, with the rank's number.
"""

import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]  # not in its list of names
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as meetings

from tuner.errors import LostRankError, MachineError, MemoryLimitError, TunerError, is_out_of_memory, memory_line
from tuner.runtime import phase
from tuner.runtime.dist import RankInfo, rendezvous, threads_per_rank

T = TypeVar("T")
_store: tuple[tuple[str, int, int], Store] | None = None
"""Where this process meets others, for as long as it lives: the first rank may host it, or torchrun does for all."""
_groups = 0
"""Process groups that were made there. Each has keys of its own: those of the one before are still in the store."""
_asked = 0
"""What was asked of rank 0 there, which every rank asks alike. Both begin again in another store: not every process
that meets there has met in the one before."""
LAZY_FROM = 256
"""Processes from which on gloo connects two of them when they first exchange something. Otherwise a group has a socket
for every other process, and each process reads 8 bytes of every other for every other through the one store: at 1,000
processes 1,003 sockets and 8 MB in each, 8 GB in all, for every group (tools/startup_at_scale.py)."""
_gloo: tuple[object, ProcessGroup | None] | None = None
"""The default group and the gloo group made for it, so that a second default group gets one of its own."""


@contextmanager
def process_group(rank_info: RankInfo, device: str, timeout_s: float, alone: bool = False) -> Iterator[None]:
    """Join the run's processes for the length of the block: gloo on `cpu`, gloo and NCCL on `cuda`.

    World size 1 starts nothing, unless one process is to be a group `alone`. Without OMP_NUM_THREADS, each local rank
    gets its share of the cores.
    `timeout_s` bounds every collective, in seconds. Raises MachineError when the processes cannot meet, and
    LostRankError in place of what a collective raises when another process is gone or silent.
    """
    if rank_info.world_size == 1 and not alone:
        yield
        return
    global _groups  # noqa: PLW0603
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(rank_info))
    own = torch.device("cuda", device_index(rank_info)) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    if rank_info.world_size >= LAZY_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=_meet(rank_info, timeout_s) if rank_info.world_size > 1 else HashStore(), rank=rank_info.rank,
            world_size=rank_info.world_size, timeout=timedelta(seconds=timeout_s),
        )
        group = gloo_group(timeout_s)
        _groups += 1
        if own is not None:
            _require_own_devices(own, group)
            # NCCL connects in the first collective: here, where what keeps it from that is named as such.
            dist.all_reduce(torch.zeros(1, device=own))
            torch.cuda.synchronize(own)
    except (RuntimeError, ValueError, OSError) as error:
        if is_out_of_memory(error):
            raise
        raise _left_by_others(rank_info, f"join the others: {_nccl_words(error) or error}") from error
    try:
        yield
    except BaseException as error:
        # With NCCL, an orderly end would wait for collectives that the failed rank never joins.
        if device != "cuda":
            _leave()
        if is_lost_rank(error):
            said = _nccl_words(error)
            raise LostRankError(
                f"rank {rank_info.rank} lost another process of the run{phase.at()}: it ended, or was silent for "
                "longer than parallel.timeout" + (f" (NCCL: {said})" if said else ""),
                hint="that process says why, or the log of its rank does",
            ) from error
        raise
    _leave()


def _left_by_others(rank_info: RankInfo, what: str) -> MachineError:
    said = f"rank {rank_info.rank} of {rank_info.world_size} could not {what}"
    return MachineError(said, hint="check MASTER_ADDR and MASTER_PORT, and that every process was started")


def device_index(rank_info: RankInfo) -> int:
    """The CUDA device of this process, among those that it sees: the one place where a rank becomes a device.

    It is the local rank, but 0 where the launcher shows each process one device of its own, as SLURM does with
    ``--gpus-per-task`` and ``--gpu-bind``. That two processes share none is checked where they meet.
    """

    return 0 if torch.cuda.device_count() == 1 < rank_info.local_world_size else rank_info.local_rank


def _require_own_devices(own: torch.device, group: ProcessGroup | None) -> None:
    """Check that no two processes compute on one device, which NCCL refuses in other words. Collective.

    Raises MachineError on every rank.
    """

    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(own).uuid))
    seen: dict[tuple[str, str], int] = {}
    for rank, theirs in enumerate(Collective(group).on_all_ranks(lambda: mine)):
        if theirs in seen:
            raise MachineError(
                f"ranks {seen[theirs]} and {rank} have one CUDA device between them, on {theirs[0]}",
                hint="start as many processes as there are GPUs (parallel.processes, or the launcher's number)",
            )
        seen[theirs] = rank


def from_rank0(rank_info: RankInfo, timeout_s: float, name: str, work: Callable[[], str]) -> str:
    """What `work` gives on rank 0, on every rank, before there is a process group; `name` tells it from others.

    The others wait for at most `timeout_s` seconds. Raises MachineError where the processes cannot meet, or rank 0 ends
    without an answer.
    """
    if rank_info.world_size == 1:
        return work()
    global _asked  # noqa: PLW0603
    try:
        store = _meet(rank_info, timeout_s)
        _asked += 1
        key = f"{name} {_asked}"
        if rank_info.is_main:
            store.set(key, work())
        answer: bytes = store.get(key)
    except (RuntimeError, ValueError, OSError) as error:
        raise _left_by_others(rank_info, f"agree with the others: {error}") from error
    return answer.decode()


def _meet(rank_info: RankInfo, timeout_s: float) -> Store:
    """Find the store through which the processes meet, within `timeout_s` seconds.

    Where nobody listens, torch tries twice to connect, each time for as long as it is given.
    """
    global _store, _groups, _asked  # noqa: PLW0603 - as process-wide as the group that is made with it
    address = rendezvous(os.environ)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if address == "env://" else address
    place = (where, rank_info.rank, rank_info.world_size)
    if _store is None or _store[0] != place:
        half = timedelta(seconds=timeout_s / 2)
        _store = (place, next(meetings(address, rank_info.rank, rank_info.world_size, timeout=half))[0])
        _groups = _asked = 0
    _store[1].set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"group {_groups}", _store[1])


def gloo_group(timeout_s: float | None = None) -> ProcessGroup | None:
    """The CPU group over all ranks for agreement and checkpoints; None in a single process.

    The first call in a process group makes it and is collective: every rank must make it together.
    """
    global _gloo  # noqa: PLW0603 - mirrors torch's own process-wide default group
    world = dist.group.WORLD  # None where there is none
    if _gloo is None or _gloo[0] is not world:
        _gloo = (world, another_gloo_group(timeout_s))
    return _gloo[1]


def another_gloo_group(timeout_s: float | None) -> ProcessGroup | None:
    """A further CPU group over all ranks, for the collectives of one thread; None in a single process. Collective."""
    if not dist.is_initialized():
        return None
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
    # Where gloo connects lazily, it misses a process that is lost before its first exchange until the time-out.
    any_rank(False, group)
    return group


def any_rank(flag: bool, group: ProcessGroup | None) -> bool:
    """Whether `flag` is true on any rank of `group`: collective; without a group, `flag` itself."""
    return any_of((flag,), group)[0]


def any_of(flags: Sequence[bool], group: ProcessGroup | None) -> tuple[bool, ...]:
    """`any_rank` of several flags in one collective of the CPU's; the device is not waited for."""
    if group is None:
        return tuple(flags)
    votes = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return tuple(bool(vote) for vote in votes.tolist())


def of_rank(rank: int, error: BaseException) -> Exception:
    """What other ranks raise for an exception of `rank`; one that is not the user's to mend becomes a RuntimeError."""
    if isinstance(error, TunerError):
        return type(error)(f"rank {rank}: {error.message}", error.hint)
    if is_out_of_memory(error):
        return MemoryLimitError(f"rank {rank}: out of memory: {memory_line(error)}")
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


class Collective:
    """All ranks of a group, or the only process when `group` is None. Every method is collective."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; each gets its own result. Raises the first rank's exception everywhere."""
        if self.group is None:
            return work()
        error: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - sent to every rank, then raised
            error = raised
        if any_rank(error is not None, self.group):
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, None if error is None else of_rank(self.rank, error), group=self.group)
            raise next(answer for answer in answers if answer is not None) from error
        return cast("T", result)

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns all results in rank order. Raises the first rank's exception everywhere.

        Every rank receives as many of the largest result as there are ranks: it is for results of some bytes.
        """
        result = self.together(work)
        if self.group is None:
            return [result]
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, result, group=self.group)
        return answers

    def to_rank0(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; rank 0 gets all results in rank order, the others none. Raises as the others do."""
        result = self.together(work)
        if self.group is None:
            return [result]
        answers: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(result, answers or None, group_dst=0, group=self.group)
        return answers

    def from_rank0(self, parts: Callable[[], Sequence[T]]) -> T:
        """What rank 0 alone makes, a part for each rank: this one's. Raises rank 0's exception everywhere."""
        given = self.together(lambda: list(parts()) if self.rank == 0 else None)
        own: list[Any] = [None]
        if self.group is None:
            own = cast("list[Any]", given)
        else:
            dist.scatter_object_list(own, given, group_src=0, group=self.group)
        return cast("T", own[0])

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone; every rank gets its result, or its exception."""
        given = [self.together(lambda: work() if self.rank == 0 else None)]
        if self.group is not None:
            dist.broadcast_object_list(given, group_src=0, group=self.group)
        return cast("T", given[0])


# How gloo words, in a bare RuntimeError, that the other end is gone or silent.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out waiting", "imeout caused")


def is_lost_rank(error: BaseException) -> bool:
    """Whether an exception says that another process is gone or silent, in torch's, gloo's or NCCL's words."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def _nccl_words(error: BaseException) -> str:
    """What NCCL says of an error of its own, without where in its sources it says so; empty for other errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, dist.DistBackendError) or not lines:
        return ""
    last = lines.index("Last error:") + 1 if "Last error:" in lines else len(lines)
    return lines[last] if last < len(lines) else lines[-1]


def _leave() -> None:
    global _gloo  # noqa: PLW0603
    _gloo = None
    if dist.is_initialized():
        # A group still held, if only by a cycle, outlives its end: its threads then meet the end of Python, and abort.
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
