"""Commands whose runs lie in a real store: killed, resumed from an emptied stage, exported, and held by one launch."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import commands, trainings
from tests.fixtures.store_proxy import Request, proxied
from tests.fixtures.store_servers import Server, serving
from tests.fixtures.tables import cases
from tests.multi.launcher import bound_listener, open_store, rank_environment
from tuner.runtime.files import read_json
from tuner.stores.directory import StoreDirectory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("s3", tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def led_to_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def environment(server: Server, cache: Path) -> dict[str, str]:
    return {"TUNER_CACHE": str(cache), **commands.QUIET, **server.environment()}


def wait_for_step(process: subprocess.Popen[bytes], url: str, step: int) -> None:
    while (commit := StoreDirectory.open(url).newest()) is None or commit.note.get("step", 0) < step:
        assert process.poll() is None, "the launch ended by itself"
        time.sleep(0.1)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The command and the ranks that it started, which are in sessions of their own."""
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_is_resumed_without_its_stage_and_exported(server: Server, tmp_path: Path, processes: int) -> None:
    trainings.prepare(tmp_path, processes)
    own, url = environment(server, tmp_path / "cache"), server.url(f"runs/{processes}")
    flags = ["--train.duration", "200 steps", "--parallel.processes", str(processes)]
    commands.tuner("train", "r.yaml", "--output_dir", "plain", *flags, cwd=tmp_path, code=0, **own)
    command = [sys.executable, "-m", "tuner", "train", "r.yaml", "--output_dir", url, *flags]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **own})
    try:
        wait_for_step(process, url, 8)
        another = environment(server, tmp_path / "another")
        refused = commands.tuner("resume", url, cwd=tmp_path, **another)
    finally:
        kill(process)
    assert refused.returncode == 4, refused.stderr
    assert f"{url} is in use by another launch" in refused.stderr and "pid" in refused.stderr
    shutil.rmtree(tmp_path / "cache" / "stores")
    commands.tuner("resume", url, cwd=tmp_path, code=0, **own)
    stage = tmp_path / "cache" / "stores" / url.replace("://", "/")
    assert trainings.outcome(stage) == trainings.outcome(tmp_path / "plain")
    target = server.url(f"exports/{processes}")
    done = commands.tuner("export-hf", url, "--output", target, "--json", cwd=tmp_path, **another)
    assert commands.document(done)["artifacts"]["path"] == target
    commands.tuner("export-hf", "plain", "--output", "out", cwd=tmp_path, code=0, **own)
    stored = StoreDirectory.open(target).fetch(tmp_path / "fetched")
    assert stored is not None
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "fetched")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_rows_of_a_bucket_are_trained_on_through_faults_and_kills(server: Server, tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    texts = ({"text": f"{i} " + "ab cd " * (i % 300)} for i in range(12_000))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    flags = ["--method.kind", "pretrain", "--data.packing", "true", "--train.duration", "30 steps"]
    flags += ["--data.cache_dir", server.url("rows")]
    own = environment(server, tmp_path / "a")
    commands.tuner("train", "r.yaml", "--output_dir", "plain", *flags, cwd=tmp_path, code=0, **own)
    draw, asked = random.Random(0), 0
    process: subprocess.Popen[bytes] | None = None

    def choose(request: Request) -> str | None:
        nonlocal asked
        if request.method != "GET" or not any(name.lower() == "range" for name in request.headers):
            return None
        asked += 1
        if asked == 4 and process is not None:
            process.kill()
        return draw.choice(["cut", "drop", "503", "slow", None])

    with proxied(server.port, choose) as proxy:
        other = {**environment(server, tmp_path / "b"), **server.environment(proxy.port)}
        command = [sys.executable, "-m", "tuner", "train", "r.yaml", "--output_dir", "faults", *flags]
        process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **other})
        assert process.wait() == -signal.SIGKILL
        done = commands.tuner("resume", "faults", cwd=tmp_path, code=0, **other)
    assert asked > 8 and proxy.happened, done.stderr
    assert trainings.outcome(tmp_path / "faults") == trainings.outcome(tmp_path / "plain")


MACHINES = ["--train.duration", "60 steps", "--parallel.shard", "full", "--export.at_end", "true"]


@pytest.fixture(scope="module")
def unbroken(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of two processes on one machine comes to, on its disk."""
    place = tmp_path_factory.mktemp("unbroken")
    trainings.prepare(place, 2)
    flags = ["--output_dir", "plain", "--parallel.processes", "2", *MACHINES]
    commands.tuner("train", "r.yaml", *flags, cwd=place, code=0, **environment(server, place / "cache"))
    return trainings.outcome(place / "plain")


@contextlib.contextmanager
def machines(directory: Path, port: int, server: Server, *words: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes of a launch that stand for two machines: each has a cache, and thus a stage, of its own."""
    listener, meeting_port = bound_listener()
    meeting = open_store(listener, meeting_port)
    processes = []
    for rank in range(2):
        env = rank_environment(rank, 2, meeting_port) | environment(server, directory / f"cache-{rank}")
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **server.environment(port)}
        processes.append(subprocess.Popen([sys.executable, "-m", "tuner", *words], cwd=directory, env=env))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del meeting


def in_machines(directory: Path, server: Server, *words: str, code: int = 0) -> None:
    with machines(directory, server.port, server, *words) as processes:
        assert [process.wait(300) for process in processes] == [code] * 2


def stages_of(directory: Path, url: str) -> list[Path]:
    return [directory / f"cache-{rank}" / "stores" / url.replace("://", "/") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "killed", "emptied"), cases(__file__, "killed_and_emptied"))
def test_machines_without_a_common_disk_resume_one_run(
    server: Server, unbroken: dict[str, Any], tmp_path: Path, at: str, killed: tuple[int, ...], emptied: tuple[int, ...]
) -> None:
    """Killed while the third save is uploaded, or once it is and before its commit is put."""
    trainings.prepare(tmp_path, 2)
    url = server.url(f"machines/{tmp_path.name}")
    train = ["train", "r.yaml", "--output_dir", url, "--resume", "auto", *MACHINES]
    processes: list[subprocess.Popen[bytes]] = []
    commits = 0  # the first one is a launch's own

    def choose(request: Request) -> str | None:
        nonlocal commits
        commits += request.kind == "if" and "/tuner/commits/" in request.path
        if commits < 3 or (commits == 3 and (at, request.kind) != ("put", "put")):
            return None
        for rank in killed:
            processes[rank].kill()
        return "drop" if 0 in killed else None

    with proxied(server.port, choose) as proxy, machines(tmp_path, proxy.port, server, *train) as started:
        processes += started
        assert [process.wait(300) for process in processes] == [-9 if rank in killed else 4 for rank in range(2)]
    stored = StoreDirectory.open(url).newest()
    assert stored is not None
    files = [sum(f"rank-000{rank}-of-0002" in name for name in stored.files) for rank in range(2)]
    assert files[0] == files[1] > 0
    for rank in emptied:
        shutil.rmtree(stages_of(tmp_path, url)[rank])
    in_machines(tmp_path, server, *train)
    assert trainings.outcome(stages_of(tmp_path, url)[0]) == unbroken
    assert not list(tmp_path.glob("cache-*/**/checkpoints/.*")), "nothing unfinished is left"
    stored = StoreDirectory.open(url).newest()
    assert stored is not None
    assert {"exports/step-60/model.safetensors", "checkpoints/step-60/manifest.json"} < stored.files.keys()
    assert StoreDirectory.open(f"{url}/exports/step-60").newest() is None, "published once"


@pytest.mark.slow
def test_one_machine_resumes_what_two_began_and_two_what_one_did(server: Server, tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2)
    url, other = server.url("machines/counts"), environment(server, tmp_path / "cache-1")
    where = ["--output_dir", url, "--train.duration", "30 steps"]
    in_machines(tmp_path, server, "train", "r.yaml", *where, "--train.stop_after", "10 steps", code=75)
    commands.tuner("resume", url, "--train.stop_after", "10 steps", cwd=tmp_path, code=75, **other)
    in_machines(tmp_path, server, "resume", url)
    stages = stages_of(tmp_path, url)
    log = [line["step"] for line in trainings.lines(stages[0]) if line["kind"] == "train"]
    assert log == list(range(1, 31))
    assert [entry["world_size"] for entry in read_json(stages[0] / "run.json")["launches"]] == [2, 1, 2]
    assert (stages[1] / "checkpoints" / "step-20").is_dir(), "what it had when the last launch began"
