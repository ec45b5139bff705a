"""Writers of a store directory killed, paused and lied to by the network; readers check what is there after each.

    python -m tools.store_campaign --points 500 --out stores.jsonl
    python -m tools.store_campaign --scheme az --points 50 --out stores-az.jsonl
    python -m tools.store_campaign --throughput
    python -m tools.store_campaign --rows

A writer takes the lease, fetches, and publishes versions of a directory whose files are a function of the version; it
speaks to the server through a proxy that does what `tests.fixtures.store_proxy.FAULTS` lists. In a point it is killed
(SIGKILL), or left to the faults, or stopped while another, elsewhere, takes the lease from it, and let go afterwards.
Meanwhile and afterwards a reader without faults fetches: every file must be that of one version, the newest commit
none before the last that a writer took for done, no number acknowledged twice; and after orphans are collected the
store must hold the data of its two commits and nothing else. Another with the same --out does the points that are
left. Exits with 1 where a point found a problem.
"""

import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fixtures.store_proxy import Proxy, forward, proxied, translated
from tests.fixtures.store_servers import Server, serving
from tools.commands import Results, asked, one_of, workplace
from tools.store_rows import rows_by_index
from tools.store_throughput import throughput
from tools.strikes import POINTS, Network, struck
from tuner.errors import MachineError
from tuner.stores import client, transfer
from tuner.stores import directory as lease
from tuner.stores.commit import FILES, read_commit
from tuner.stores.directory import KEPT_COMMITS, StoreDirectory

GROUP = 20
"""Points on one directory before another is begun."""
VERSIONS = 3
"""What a writer publishes before it ends by itself."""
LONGEST_S = 120.0
KINDS = ("kill", "kill", "kill", "faults", "faults", "pause")


def expected(version: int) -> dict[str, bytes]:
    """The files of a version; of links, `->` and where they lead."""
    files = {
        "run.json": b'{"version": %d}' % version,
        "metrics.jsonl": b"".join(b'{"step": %d}\n' % step for step in range(version + 1)),
        "constant.bin": random.Random(0).randbytes(100_000), "exports/latest": b"->step-%d" % version,
    }
    for step in range(max(0, version - 1), version + 1):
        sizes = random.Random(step)
        for name in ("weights.bin", "optimizer.bin"):
            files[f"checkpoints/step-{step}/{name}"] = sizes.randbytes(sizes.choice((0, 100, 5_000, 65_536, 200_000)))
        files[f"checkpoints/step-{step}/manifest.json"] = b"%d" % step
    return files


def found(directory: Path) -> dict[str, bytes]:
    """What lies in a directory, as `expected` has it."""
    return {
        path.relative_to(directory).as_posix(): (
            b"->" + os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        )
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def make(directory: Path, version: int) -> None:
    """Have a directory hold a version: as a training does, by appending, replacing and removing."""
    wanted, there = expected(version), found(directory)
    for name in there.keys() - wanted.keys():
        (directory / name).unlink()
    for name, data in wanted.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data.startswith(b"->"):
            path.unlink(missing_ok=True)
            path.symlink_to(os.fsdecode(data[2:]))
        elif name in there and data.startswith(there[name]):
            with path.open("ab") as file:
                file.write(data[len(there[name]) :])
        elif there.get(name) != data:
            path.with_name(f".tmp-{path.name}").write_bytes(data)
            path.with_name(f".tmp-{path.name}").replace(path)


def write(environment: dict[str, str], url: str, stage: Path, acknowledged: Path, seed: int) -> None:
    """A writer: exit code 0 after its versions, 4 where the store is out of reach or another's; else it is a bug."""
    faulthandler.dump_traceback_later(LONGEST_S - 10)
    os.environ.update(environment)
    client.REQUEST_SECONDS, client.RETRY_SECONDS, client.CONNECT_SECONDS = 1, 2, 1
    lease.TTL_SECONDS = 2.0
    transfer.PART_BYTES, transfer.SMALL_BYTES = 1 << 16, 6_000
    draw = random.Random(seed)
    try:
        directory = StoreDirectory.open(url)
        with directory.lease(stage, lock_is_free=draw.random() < 0.9):
            known, there = stage.is_dir() and found(stage), stage.is_dir()
            commit = directory.fetch(stage)
            stage.mkdir(parents=True, exist_ok=True)
            version = 0 if commit is None else int(commit.note["version"])
            if commit is not None and (not there or found(stage) != known) and found(stage) != expected(version):
                raise AssertionError("the stage is not what was fetched")
            directory.collect()
            for _ in range(VERSIONS):
                version += 1
                make(stage, version)
                snapshot = directory.snapshot(stage, {"version": version})
                if draw.random() < 0.5:  # training goes on
                    make(stage, version + 1)
                done = directory.publish(snapshot)
                with acknowledged.open("a") as file:
                    file.write(json.dumps([done.number, done.commit_id, version]) + "\n")
    except MachineError as error:
        acknowledged.with_suffix(".said").write_text(str(error))
        sys.exit(4)


def orphans(url: str, stage: Path) -> Iterator[str]:
    """Collect orphans without faults; what is left that should not be, or the other way round."""
    directory = StoreDirectory.open(url)
    with directory.lease(stage, lock_is_free=True):
        directory.collect()
        numbers = directory._numbers()
        commits = [read_commit(directory._client, number) for number in numbers]
    named = {key for commit in commits if commit is not None for key in commit.data}
    if set(directory._client.names(FILES)) != named or len(numbers) > KEPT_COMMITS:
        yield f"{len(numbers)} commits, and data that are not theirs"


class Group:
    """Points that follow each other on one directory of a server."""

    def __init__(self, server: Server, proxy: Proxy, place: Path, name: str) -> None:
        self.server, self.proxy, self.place = server, proxy, place
        self.url = server.url(name)
        self.stage, self.acknowledged = place / "stage" / name, place / f"{name}.acknowledged"
        self.stage.parent.mkdir(exist_ok=True)
        self.acknowledged.touch()
        self.processes = multiprocessing.get_context("forkserver")
        self.fetches = 0
        self.seen: dict[int, str] = {}
        """Each commit that was read: what a stopped writer takes for done under its number is a lie."""

    def point(self, seed: int) -> dict[str, Any]:
        """One point; its row."""
        draw = random.Random(seed)
        network = Network(self.proxy, draw, KINDS, (0.0, 0.05, 0.1, 0.2, 0.4), 70)
        self.victim: Any = None
        with network.around(lambda: self.victim.kill() if network.kind == "kill" else None):
            if draw.random() < 0.2:
                shutil.rmtree(self.stage, ignore_errors=True)
            problems = list(self._writers(network.kind, draw))
        problems += self._read()
        if seed % 5 == 0:
            problems += orphans(self.url, self.stage)
        said = self.acknowledged.with_suffix(".said")
        return {
            **network.row(), "fetches": self.fetches, "acknowledged": len(self._acknowledged()), "exits": self.exits,
            "problems": problems, "said": said.read_text()[:200] if said.exists() else "",
        }  # fmt: skip

    def _writers(self, kind: str, draw: random.Random) -> Iterator[str]:
        self.exits: list[int | None] = []
        self.acknowledged.with_suffix(".said").unlink(missing_ok=True)
        first = self.victim = self._start(self.stage, draw.randrange(1 << 30))
        writers, until = [first], time.monotonic() + LONGEST_S
        struck = time.monotonic() + draw.uniform(0.05, 1.5)
        by_time = draw.random() < 0.3
        while any(writer.is_alive() for writer in writers) and time.monotonic() < until:
            yield from self._read()
            if kind == "kill" and by_time and time.monotonic() > struck:
                first.kill()
            if kind == "pause" and len(writers) == 1 and time.monotonic() > struck and first.is_alive():
                self._signal(first, signal.SIGSTOP)
                writers.append(self._start(self.place / "another" / "machine", draw.randrange(1 << 30)))
            if len(writers) == 2 and not writers[1].is_alive():
                self._signal(first, signal.SIGCONT)
            time.sleep(0.1)
        for writer in writers:
            self._signal(writer, signal.SIGCONT)
            if writer.is_alive():
                yield f"a writer did not end in {LONGEST_S:.0f} s"
                writer.kill()
            writer.join()
            self.exits.append(writer.exitcode)
            if writer.exitcode not in (0, 4, -signal.SIGKILL):
                yield f"a writer ended with {writer.exitcode}"

    def _signal(self, process: Any, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _start(self, stage: Path, seed: int) -> Any:
        environment = self.server.environment(self.proxy.port)
        words = (environment, self.url, stage, self.acknowledged, seed)
        process = self.processes.Process(target=write, args=words)
        process.start()
        return process

    def _acknowledged(self) -> list[tuple[int, str, int]]:
        return [(row[0], row[1], row[2]) for row in map(json.loads, self.acknowledged.read_text().splitlines())]

    def _read(self) -> Iterator[str]:
        """Fetch the newest commit without faults; what is wrong with it."""
        before, target = self._acknowledged(), self.place / "read"
        shutil.rmtree(target, ignore_errors=True)
        commit = StoreDirectory.open(self.url).fetch(target)
        self.fetches += 1
        if commit is None:
            if before:
                yield f"nothing is there, acknowledged was {before[-1]}"
            return
        version = int(commit.note["version"])
        if found(target) != expected(version):
            yield f"commit {commit.number} is not version {version}"
        last = max(before, default=(0, "", 0))
        if commit.number < last[0] or version < last[2]:
            yield f"commit {commit.number} of version {version} is newest, acknowledged was {last}"
        if len({number for number, _, _ in before}) != len(before):
            yield "a number was acknowledged twice"
        self.seen[commit.number] = commit.commit_id
        for number, name, _ in before:
            if self.seen.get(number, name) != name:
                yield f"commit {number} is another than was acknowledged"


def campaign(options: Any) -> int:
    """The points that are left; the exit code."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "obstore.store"])
    send, groups = translated if options.scheme == "gs" else forward, dict[int, Group]()
    with (
        workplace() as place, serving(options.scheme, place) as server,
        proxied(server.port, lambda _: None, send) as proxy, proxied(server.port, lambda _: None, send) as plain,
    ):  # fmt: skip
        os.environ.update(server.environment(plain.port if options.scheme == "gs" else None))

        def point(number: int) -> dict[str, Any]:
            group = number // GROUP
            if group not in groups:
                groups[group] = Group(server, proxy, place, f"run-{group}")
            return groups[group].point(number)

        return struck(options, Results(options.out), point)


def main() -> int:
    """Run the campaign, or compare the speed."""
    options = asked(
        __doc__, scheme=one_of(("s3", "gs", "az"), "s3"), rows=(False, "of prepared data, read by random index"),
        throughput=(False, "against plain puts and gets of the same bytes"), **POINTS,
    )
    if options.throughput or options.rows:
        return (throughput if options.throughput else rows_by_index)(Results(options.out))
    return campaign(options)


if __name__ == "__main__":
    raise SystemExit(main())
