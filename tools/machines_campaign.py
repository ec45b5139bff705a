"""Train on two machines of two processes each, kill one of the machines, let it come back, and compare the end.

    python -m tools.machines_campaign --trials 2 --seed 0
    python -m tools.machines_campaign --flags --parallel.tensor 2

A machine is a torchrun in a network namespace of its own, joined to the other by a pair of virtual links; where this
user may not make namespaces (they need root), both are on the loopback, and each line says so. The two meet at a store
of the first one. A LoRA run with dropout is trained once unbroken. Each trial kills every process of one machine
(SIGKILL) at a random step and starts its torchrun again. Where it was the second machine, the torchrun of the first one
runs all the while: it ends its two processes, waits, and both machines train from the last checkpoint. Where it was the
first one, the store is gone with it, the second torchrun ends by itself, and both are started again, as a scheduler
does with a job. The run must end with the tensors (SHA-256) and the losses of the unbroken one. Prints a JSON line a
trial; exits with 1 where one differs. What follows ``--flags`` is given to every run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fixtures.processes import of_variable, processes_where
from tests.fixtures.trainings import STEPS_PER_EPOCH, TOTAL, outcome, prepare
from tools.commands import Results, asked, environment, free_port, workplace
from tools.strikes import kill

MACHINE, EACH = "MACHINES_CAMPAIGN", 2
"""The variable by which a machine's processes are found, and how many train."""
PATIENCE_S = 900.0
"""Seconds after which a machine that does not end is given up."""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Of torch: else the first machine says where its store is in the first round alone, and one that comes back waits for
that in vain (torch 2.13, ``DynamicRendezvousHandler.next_rendezvous``)."""
ADDRESSES = ("10.77.23.1", "10.77.23.2")


@dataclass
class Machine:
    """A launcher, where it is on the network, and what starts a command there."""

    number: int
    address: str
    interface: str
    prefix: list[str] = field(default_factory=list)
    launcher: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Of this campaign's, which its processes have in their environment."""
        return f"{os.getpid()}-{self.number}"

    def start(self, directory: Path, store: str, words: Sequence[str]) -> None:
        """Start its launcher; its output is added to a log of the machine's own."""
        command = [
            *self.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node",
            str(EACH), "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", store, "--rdzv-id", "job",
            "--rdzv-conf", f"is_host={int(self.number == 0)}", "--local-addr", self.address,
            "-m", "tuner", "train", "r.yaml", *words,
        ]  # fmt: skip
        own = {MACHINE: self.name, "GLOO_SOCKET_IFNAME": self.interface}
        env = environment(directory / "cache", PYTHONWARNINGS="ignore", **own)
        with (directory / f"machine{self.number}.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                command, cwd=directory, env=env | FRESH_STORE, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> int:
        """Kill its launcher and all that it started, at once; how many processes there were."""
        assert self.launcher is not None
        count = kill(processes_where(of_variable(MACHINE, self.name)))
        self.launcher.wait()
        return count

    def ended(self) -> int:
        """Its launcher's exit code, once it has ended. Raises TimeoutExpired."""
        assert self.launcher is not None
        return self.launcher.wait(PATIENCE_S)


@contextmanager
def two_machines() -> Iterator[tuple[list[Machine], str]]:
    """Two machines, and what their network is made of."""
    names = [f"tuner-{os.getpid()}-{number}" for number in range(2)]
    try:
        for words in _links(names):
            subprocess.run(["ip", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        _remove(names)
        yield [Machine(number, "127.0.0.1", "lo") for number in range(2)], "loopback"
        return
    try:
        enter = [["ip", "netns", "exec", name] for name in names]
        yield [Machine(n, ADDRESSES[n], f"link{n}", enter[n]) for n in range(2)], "network namespaces"
    finally:
        _remove(names)


def _links(names: Sequence[str]) -> Iterator[list[str]]:
    """What is to be said to ``ip`` for two namespaces with a link between them."""
    for name in names:
        yield ["netns", "add", name]
    ends = ["name", "link0", "netns", names[0], "type", "veth", "peer", "name", "link1", "netns", names[1]]
    yield ["link", "add", *ends]
    for number, name in enumerate(names):
        yield ["-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"link{number}"]
        for link in ("lo", f"link{number}"):
            yield ["-n", name, "link", "set", link, "up"]


def _remove(names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def await_step(run: Path, step: int) -> None:
    """Return once a run has taken so many steps. Raises TimeoutError."""
    until, log = time.monotonic() + PATIENCE_S, run / "metrics.jsonl"
    while not log.is_file() or len(log.read_text().splitlines()) < step:
        if time.monotonic() > until:
            raise TimeoutError(f"{run}: step {step} does not come")
        time.sleep(0.05)


def trained(machines: Sequence[Machine], directory: Path, name: str, words: Sequence[str]) -> list[int]:
    """Train a run from its start to its end; the launchers' exit codes."""
    store = f"{machines[0].address}:{free_port()}"
    for machine in machines:
        machine.start(directory, store, ["--name", name, *words])
    return [machine.ended() for machine in machines]


def trial(machines: Sequence[Machine], directory: Path, number: int, step: int, words: Sequence[str]) -> dict[str, Any]:
    """Kill machine ``number`` at a step and start it again."""
    name, store = f"killed-{number}-{step}", f"{machines[0].address}:{free_port()}"
    words = ["--name", name, "--resume", "auto", *words]
    for machine in machines:
        machine.start(directory, store, words)
    await_step(directory / "runs" / name, step)
    killed, other = machines[number], machines[1 - number]
    count = killed.kill()
    ended_itself = other.ended() if number == 0 else None  # it has lost the store
    killed.start(directory, store, words)
    if number == 0:
        other.start(directory, store, words)
    codes = [machine.ended() for machine in machines]
    return {"machine": number, "killed_at_step": step, "processes": count, "other_ended": ended_itself, "codes": codes}


def campaign(directory: Path, trials: int, seed: int, flags: Sequence[str]) -> list[dict[str, Any]]:
    """The unbroken run, and trials against it, of both machines in turn."""
    prepare(directory, 1)
    words, chance = ["--train.micro_batch_size", "1", "--checkpoint.every", "4 steps", *flags], random.Random(seed)
    results = Results()
    with two_machines() as (machines, network):
        try:
            codes = trained(machines, directory, "unbroken", words)
            unbroken = outcome(directory / "runs" / "unbroken")
            if any(codes) or not unbroken["log"]:
                raise RuntimeError(f"unbroken: {codes}\n{(directory / 'machine0.log').read_text()[-4000:]}")
            for index in range(trials):
                step = chance.randrange(STEPS_PER_EPOCH, TOTAL - 3)
                found = trial(machines, directory, 1 - index % 2, step, words)
                ended = outcome(directory / "runs" / f"killed-{found['machine']}-{step}")
                results.add({"network": network, **found, "identical": ended == unbroken})
        finally:
            for machine in machines:
                if machine.launcher is not None and machine.launcher.poll() is None:
                    machine.kill()
    return results.rows


def main() -> int:
    """Run the campaign."""
    options = asked(
        __doc__, trials=2, seed=0,
        flags=({"nargs": argparse.REMAINDER, "default": []}, "of `tuner train`, the last option here"),
    )
    with workplace() as directory:
        results = campaign(directory, options.trials, options.seed, options.flags)
    good = sum(result["identical"] and not any(result["codes"]) for result in results)
    print(json.dumps({"trials": len(results), "identical": good, "seed": options.seed}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
