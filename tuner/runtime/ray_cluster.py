"""A Ray cluster: the one that RAY_ADDRESS names, else one of this machine's cores for as long as it is needed; and the
processes of one run on it: an actor for each rank, which starts it as a child and watches it.

Ray is imported here alone. It says nothing on the terminal, and this process's signals stay its own.

A rank is what it is on one machine: a fresh interpreter that finds torchrun's variables, heeds signals and leaves a
report. Its actor gives the report, the exit code and the words of rank 0 to the process that a person started, in which
the store is through which the ranks meet. Where an actor is lost, its rank sees that its parent is gone, and stops.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tuner.errors import MachineError, RecipeError, TunerError, counted, first_line
from tuner.runtime import phase, spawn
from tuner.runtime.activity import STDERR, Doing
from tuner.runtime.dist import RankInfo, cores
from tuner.runtime.environment import PREFIXES, python_path, versions
from tuner.runtime.files import scratch_dir, write_all, write_json
from tuner.runtime.spawn import JOB, KILL_S, LOOPBACK, End, Ranks, StoreAddress, Work, rank_file
from tuner.runtime.stop import SIGNALS, StopSignals, put_back
from tuner.runtime.warned import read_warned

ADDRESS = "RAY_ADDRESS"
STORE_BYTES = 64 << 20
"""Of a started cluster's object store for each core: three blocks of rows, with their tokens, and room to spare."""
LEAST_STORE_BYTES = 200 << 20
_QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else what is said of a lost worker is printed, which is said here
    "RAY_USAGE_STATS_ENABLED": "0",  # a cluster that is started here reports to nobody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns of what changes where this is not set
    "RAY_worker_niceness": "0",  # at Ray's 15, whatever else runs on the machine leaves its workers nothing
}
SAME = ("tuner", "python", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
"""Versions that decide bytes: of Python, and of packages."""


@contextmanager
def joined(cpus: int | None = None) -> Iterator[Any]:
    """Ray, connected for the length of the block; `cpus` of a cluster that is started here, one for each core without.

    One that this process has joined already stays joined after it. Raises MachineError where Ray is missing, or no
    cluster answers at RAY_ADDRESS; RecipeError for an address of Ray's client, whose processes cannot reach this one.
    """
    address = os.environ.get(ADDRESS, "")
    if address.startswith("ray://"):
        raise RecipeError(
            f"{ADDRESS}={address}: the processes of a run cannot reach a client of Ray",
            hint="run the command on a machine of the cluster: ray job submit -- tuner ...",
        )
    with _aside():
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            import ray
        except ImportError as error:
            raise MachineError("the library ray is missing", hint="install it: pip install ray") from error
    if ray.is_initialized():
        yield ray
        return
    with scratch_dir("tuner-ray-") as place:
        count = cpus or cores()
        room = max(LEAST_STORE_BYTES, count * STORE_BYTES)
        own = {"num_cpus": count, "object_store_memory": room, "include_dashboard": False, "_temp_dir": str(place)}
        started = {} if address else own
        with _aside():
            try:
                ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **started)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                said = first_line(error)
                if not address:
                    raise MachineError(f"Ray cannot be started: {said}", hint="see what ray start says") from error
                raise MachineError(
                    f"{ADDRESS}={address}: {said}",
                    hint=f"set RAY_AUTH_MODE=token if the cluster takes tokens; or unset {ADDRESS} to start one here",
                ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def node_versions() -> dict[str, str]:
    """The versions of this machine that have to be those of every other one."""
    found = versions()
    return {name: found.get(name, "none") for name in SAME}


def require_same(theirs: Mapping[str, str], ours: Mapping[str, str], node: str) -> None:
    """Raise MachineError where a machine of the cluster has other versions than the one that asks it."""
    named = ((name, theirs.get(name), version) for name, version in ours.items())
    if other := [f"{name} {has} for {wanted}" for name, has, wanted in named if has != wanted]:
        said = f"the machine {node} of the Ray cluster has {', '.join(other)}"
        raise MachineError(said, hint="install the same versions on every machine of the cluster")


def cannot_begin(said: str) -> MachineError:
    """The error for a worker that could not load what it is to do."""
    message = f"a worker of the Ray cluster cannot begin: {said}"
    return MachineError(message, hint="install this program and what it needs on every machine of the cluster")


@contextmanager
def _aside() -> Iterator[None]:
    """For what Ray does to a process as it is imported and started: its libraries write nothing in the block, such as
    each attempt to connect, what it starts imports this very package, and handlers of signals that it sets are taken
    back: it would end the process by an exception.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    path, stderr = os.environ.get("PYTHONPATH"), os.dup(2)
    os.environ["PYTHONPATH"] = python_path(os.environ)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
        if threading.current_thread() is threading.main_thread():
            put_back(handlers)


CARRIED = (*PREFIXES, "HF_", "HUGGING", "MLFLOW_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "WANDB_")
"""Beginnings of the variables of the command's environment that its ranks find in theirs."""
LEFT_ALONE = "RAY_kill_child_processes_on_worker_exit"
"""Ray would kill a rank with its actor, which is to save first."""
AT_ONCE_S = 2.0
"""What actors get to kill their ranks where the command ends at once."""


@dataclass(frozen=True)
class RayLayout:
    """How many ranks there are, and on each machine that has any: as many on one as on another."""

    ranks: int
    on_each: int
    gpus: bool
    ray: Any = field(default=None, compare=False)

    @property
    def first(self) -> RankInfo:
        """The first of them."""
        return RankInfo(0, self.ranks, 0, self.on_each)

    def bundles(self) -> list[dict[str, float]]:
        """What is asked of each machine."""
        each = {"CPU": float(self.on_each), **({"GPU": float(self.on_each)} if self.gpus else {})}
        return [each] * (self.ranks // self.on_each)


@contextmanager
def cluster_for(wanted: int | None, device: str) -> Iterator[RayLayout]:
    """Where Ray places ranks: `wanted` of them, or one for each GPU of the cluster, and one without any.

    Each has a GPU, unless `device` is `cpu` or the cluster has none. Raises RecipeError where they cannot be as many on
    each machine; MachineError as `joined`, and for a cluster without the GPUs that `device` asks for.
    """
    with joined(max(cores(), wanted or 1)) as ray:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(each.get("GPU", 0)) for each in machines)
        if device == "cuda" and not gpus:
            raise MachineError("train.device is cuda, and the Ray cluster has no GPU", hint="set train.device: auto")
        of = "GPU" if device != "cpu" and gpus else "CPU"
        ranks = wanted or (gpus if of == "GPU" else 1)
        most = max(1, *(int(each.get(of, 0)) for each in machines), 1)
        on_each = min(ranks, most)
        if ranks % on_each:
            raise RecipeError(
                f"{ranks} processes are not as many on each machine of the Ray cluster, which has up to {most} {of}s",
                hint=f"set parallel.processes: {ranks // on_each * on_each}",
            )
        yield RayLayout(ranks, on_each, of == "GPU", ray)


def run_ranks(
    layout: RayLayout, timeout_s: float, work: Work, job: Mapping[str, Any], processes: int, logs: Path, says: str = ""
) -> dict[str, Any]:
    """Call `work` with `job` in so many ranks and return rank 0's result, as `spawn.run_ranks` does.

    Their machines have `timeout_s` seconds to have room. Raises what that raises, and MachineError where they have
    none, or other versions.
    """
    assert processes == layout.ranks
    about = spawn.job_of(work, job, logs, says)
    with ExitStack() as stack:
        return spawn.supervised(_RayRanks(logs, layout, timeout_s, about, stack, layout.ray))


class RankActor:
    """In an actor: one rank's process. Its methods run in threads of their own."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self._versions = versions

    def address(self) -> str:
        """This machine's in the cluster. Raises MachineError for one with other versions."""
        require_same(node_versions(), self._versions, socket.gethostname())
        import ray

        return str(ray.util.get_node_ip_address())

    def start(
        self, rank_info: RankInfo, store: StoreAddress, carried: Mapping[str, str], job: dict[str, Any], cwd: str
    ) -> None:
        """Start the rank where the command runs, if there is such a directory here."""
        self._place = Path(tempfile.mkdtemp(prefix="tuner-rank-"))
        write_json(self._place / JOB, {**job, "parent": os.getpid()})
        own = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}  # which Ray has set
        environment = spawn.rank_environment(rank_info, store, {**own, **carried})
        if name := interface_of(self.address()):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
        self._rank = rank_info.rank
        self._process = spawn.start_rank(
            self._place, environment, cwd=cwd if os.path.isdir(cwd) else None, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self._rank == 0 else subprocess.DEVNULL,
        )  # fmt: skip

    def said(self) -> bytes:
        """What rank 0 says next, as soon as it does; empty once it has ended."""
        said = self._process.stderr
        assert said is not None
        if not (text := os.read(said.fileno(), 1 << 16)):
            said.close()
        return text

    def ended(self) -> tuple[End, str, list[str]]:
        """How the rank ended, as soon as it does; what it was doing, and what it warned of.

        Times are seconds before now: clocks of machines differ.
        """
        code, now = self._process.wait(), time.monotonic()
        if (report := spawn.report_of(self._place, self._rank)) is not None:
            report = replace(report, at_s=report.at_s - now)
        warned = list(read_warned(rank_file(self._place, self._rank, "warnings")))
        at = phase.at_last(rank_file(self._place, self._rank, "phase"))
        shutil.rmtree(self._place, ignore_errors=True)
        return End(self._rank, code, 0.0, report), at, warned

    def send(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process.poll() is None:
            spawn.send(self._process.pid, number)


@dataclass
class _RayRanks(Ranks):
    """Those of a cluster, by their actors."""

    layout: RayLayout
    timeout_s: float
    about: dict[str, Any]
    stack: ExitStack
    ray: Any
    actors: list[Any] = field(default_factory=list)
    _ended: dict[Any, int] = field(default_factory=dict)
    """What each rank's end is asked for by, and the rank."""
    _said: Any = None
    _at: dict[int, str] = field(default_factory=dict)
    _warned: list[str] = field(default_factory=list)

    def start(self, signals: StopSignals) -> None:
        """Wait for room on the machines, have an actor there for each rank, and start them all."""
        with STDERR.doing(self.about["says"]) if self.about["says"] else contextlib.nullcontext() as doing:
            group = self._room(signals, doing)
            about = {"num_cpus": 1, "num_gpus": int(self.layout.gpus), "max_concurrency": 8}
            kind = self.ray.remote(**about, runtime_env={"env_vars": {LEFT_ALONE: "false"}})(RankActor)
            for rank in range(self.layout.ranks):
                bundle = {"placement_group": group, "placement_group_bundle_index": rank // self.layout.on_each}
                self.actors.append(kind.options(**bundle).remote(node_versions()))
            addresses = self._get([actor.address.remote() for actor in self.actors])
            here = self.ray.util.get_node_ip_address()
            host = LOOPBACK if set(addresses) == {here} else here
            store = StoreAddress(host, self.stack.enter_context(spawn.local_store(host)))
            carried = {name: text for name, text in os.environ.items() if name.startswith(CARRIED)}
            started = []
            for rank, actor in enumerate(self.actors):
                rank_info = replace(self.layout.first, rank=rank, local_rank=rank % self.layout.on_each)
                started.append(actor.start.remote(rank_info, store, carried, self.about, os.getcwd()))
            self._get(started)
        self._ended = {actor.ended.remote(): rank for rank, actor in enumerate(self.actors)}
        self._said = self.actors[0].said.remote()

    def running(self) -> list[int]:
        """As their actors say; what rank 0 has said meanwhile is passed on."""
        self._pass_on()
        asked = list(self._ended)
        for ref in self.ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ():
            rank, now = self._ended.pop(ref), time.monotonic()
            try:
                end, self._at[rank], warned = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                self.ends[rank] = End(rank, 1, now, None, lost=f"its Ray worker died ({type(error).__name__})")
                continue
            report = end.report and replace(end.report, at_s=now + end.report.at_s)
            self.ends[rank] = replace(end, at_s=now, report=report)
            self._warned += warned if rank == 0 else []
        return sorted(self._ended.values())

    def send(self, number: int) -> None:
        """Through their actors."""
        sent = [self.actors[rank].send.remote(number) for rank in self._ended.values()]
        if sent and number == signal.SIGKILL:
            self.ray.wait(sent, num_returns=len(sent), timeout=AT_ONCE_S)

    def close(self) -> None:
        """With the actors; their room is free again."""
        self.kill()
        self.ray.wait(list(self._ended), num_returns=len(self._ended), timeout=KILL_S) if self._ended else None
        self.running()
        self._pass_on(timeout_s=KILL_S)
        for actor in self.actors:
            self.ray.kill(actor)

    def at(self, rank: int) -> str:
        """As its actor has told."""
        return self._at.get(rank, "")

    def warned(self) -> Iterable[str]:
        """As its actor has told."""
        return self._warned

    def _room(self, signals: StopSignals, doing: Doing | None) -> Any:
        """A placement group with room for all ranks, for as long as they run."""
        bundles = self.layout.bundles()
        group = self.ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        self.stack.callback(self.ray.util.remove_placement_group, group)
        deadline = time.monotonic() + self.timeout_s
        each = " and ".join(f"{int(many)} {of}{'' if many == 1 else 's'}" for of, many in bundles[0].items())
        wanted = f"{each} on {counted(len(bundles), 'machine')}"
        while not group.wait(1):
            if doing is not None:
                doing.update(f"waiting for the Ray cluster: {wanted}")
            if signals.requested:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise MachineError(
                    f"the Ray cluster had no room for parallel.timeout: {wanted} are needed",
                    hint="see what holds it with ray status, or set parallel.processes to fewer",
                )
        return group

    def _get(self, refs: list[Any]) -> list[Any]:
        """What actors answer. MachineError for one that cannot."""
        try:
            return list(self.ray.get(refs))
        except self.ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), TunerError):
                raise cause from error
            said = (str(cause or error).strip().splitlines() or [type(error).__name__])[-1]
            raise cannot_begin(said) from error

    def _pass_on(self, timeout_s: float = 0) -> None:
        """Say what rank 0 has said."""
        while self._said is not None and self.ray.wait([self._said], timeout=timeout_s)[0]:
            try:
                text: bytes = self.ray.get(self._said)
            except self.ray.exceptions.RayError:
                text = b""
            with STDERR.aside(), contextlib.suppress(OSError):  # its reader is gone
                write_all(2, memoryview(text))
            self._said = self.actors[0].said.remote() if text else None


def interface_of(address: str) -> str:
    """The network interface of this machine that has an address; empty where none has.

    gloo would take the one of the address that the host's name resolves to, which is often the loopback's.
    """
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if address in (each.address for each in own)), "")
