"""Commands whose runs lie in a real store: killed, resumed from an emptied stage, exported, and held by one launch."""

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

import pytest

from tests.fixtures import commands, trainings
from tests.fixtures.store_proxy import Request, proxied
from tests.fixtures.store_servers import Server, serving
from tuner.stores.directory import StoreDirectory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("s3", tmp_path_factory.mktemp("server")) as running:
        yield running


def environment(server: Server, cache: Path) -> dict[str, str]:
    return {"TUNER_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **server.environment()}


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
def test_a_killed_run_is_resumed_without_its_stage_and_exported(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    trainings.prepare(tmp_path, processes)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    own, url = environment(server, tmp_path / "cache"), server.url(f"runs/{processes}")
    flags = ["--train.duration", "200 steps", "--parallel.processes", str(processes)]
    commands.tuner("train", "r.yaml", "--output_dir", "plain", *flags, cwd=tmp_path, code=0, **own)
    command = [sys.executable, "-m", "tuner", "train", "r.yaml", "--output_dir", url, *flags]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **own, "PYTHONPATH": root})
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
        root = str(Path(__file__).resolve().parents[2])
        process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **other, "PYTHONPATH": root})
        assert process.wait() == -signal.SIGKILL
        done = commands.tuner("resume", "faults", cwd=tmp_path, code=0, **other)
    assert asked > 8 and proxy.happened, done.stderr
    assert trainings.outcome(tmp_path / "faults") == trainings.outcome(tmp_path / "plain")
