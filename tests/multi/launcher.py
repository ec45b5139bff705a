"""Starts a script on several ranks, as torchrun would, on a free port of the loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    if world_size > 1:
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return env


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(arguments: list[str], world_size: int, **options: object) -> list[subprocess.Popen[str]]:
    """Start `python ARGUMENTS` on every rank."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=rank_environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        for rank in range(world_size)
    ]


def run(arguments: list[str], world_size: int, timeout_s: float = 300) -> str:
    """Run to the end; rank 0's stdout. Fails with every rank's stderr."""
    processes = start(arguments, world_size)
    outputs = [process.communicate(timeout=timeout_s) for process in processes]
    assert all(p.returncode == 0 for p in processes), "\n".join(error[-3000:] for _, error in outputs)
    return outputs[0][0]
