"""Starts a script on several ranks, as torchrun would, meeting on the loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.fixtures import forked
from tests.fixtures.commands import QUIET, environment

CASE_WORKER = Path(__file__).with_name("case_worker.py")
_stores: list[TCPStore] = []
"""Where the ranks of this process's tests meet."""


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    env = {**os.environ, **QUIET, "HF_HUB_OFFLINE": "1"}
    if world_size > 1:
        env |= {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    return env


def run_cases(cases: list[dict[str, Any]], directory: Path) -> None:
    """Have `case_worker.py`, started once, run all of them and write what they gave into the directory."""
    done = forked.run(
        [sys.executable, str(CASE_WORKER), json.dumps(cases), str(directory)], env=environment(directory),
        capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def bound_listener() -> tuple[socket.socket, int]:
    """A listening socket of the loopback and its port, which nobody else can take between now and its use."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    return listener, int(listener.getsockname()[1])


def open_store(listener: socket.socket, port: int) -> TCPStore:
    """The store at which ranks meet that were told ``TORCHELASTIC_USE_AGENT_STORE``; kept as long as they need it."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def start(arguments: list[str], world_size: int, **options: object) -> list[subprocess.Popen[str]]:
    """Start `python ARGUMENTS` on every rank."""
    listener, port = bound_listener()
    store = open_store(listener, port)
    processes = [
        forked.Popen(
            [sys.executable, *arguments],
            env=rank_environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        for rank in range(world_size)
    ]
    _stores.append(store)
    return processes
