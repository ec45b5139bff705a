"""A Ray cluster: the one that RAY_ADDRESS names, else one of this machine's cores for as long as it is needed.

Ray is imported here alone. It says nothing on the terminal, and this process's signals stay its own.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.errors import MachineError, RecipeError
from tuner.runtime.dist import cores
from tuner.runtime.environment import versions
from tuner.runtime.files import scratch_dir
from tuner.runtime.stop import SIGNALS, put_back

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
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
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
    other = [f"{name} {has} for {wanted}" for name, has, wanted in named if has != wanted]
    if other:
        raise MachineError(
            f"the machine {node} of the Ray cluster has {', '.join(other)}",
            hint="install the same versions on every machine of the cluster",
        )


def cannot_begin(said: str) -> MachineError:
    """The error for a worker that could not load what it is to do."""
    return MachineError(
        f"a worker of the Ray cluster cannot begin: {said}",
        hint="install this program and what it needs on every machine of the cluster",
    )


@contextmanager
def _aside() -> Iterator[None]:
    """For what Ray does to a process as it is imported and started: its libraries write nothing in the block, such as
    each attempt to connect, what it starts imports this very package, and handlers of signals that it sets are taken
    back: it would end the process by an exception.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    path, stderr = os.environ.get("PYTHONPATH"), os.dup(2)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), path]))
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
