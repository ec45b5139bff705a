"""Kill and starve an export at every one of its I/O calls: the target is absent or complete, the run is as it was."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.runs import contents, write_base, write_run
from tests.fixtures.processes import fork, shim, wait
from tuner.api.exports import export_hf
from tuner.errors import MachineError
from tuner.export import hf, tensors
from tuner.export.plan import ExportOptions, ExportPlan, plan_export
from tuner.export.proof import ExportProof
from tuner.model.adapter import LoraSpec

SHARD_BYTES = 60_000
Made = tuple[Path, dict[str, bytes], dict[str, ExportProof]]
CALLS = ("fsync", "fdatasync", "rename", "write", "mkdir", "unlink", "rmdir", "sendfile")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run directory that nothing changes, what a sound export of it holds, and how each type was proven."""
    place = tmp_path_factory.mktemp("made")
    run = write_run(place / "run", write_base(place / "base", "llama"), LoraSpec(4, 8.0, 0.0, ("q_proj",)))
    prove, proofs = hf.prove, dict[str, ExportProof]()

    def proven(plan: ExportPlan, *given: Any) -> ExportProof:
        return proofs.setdefault(plan.dtype, prove(plan, *given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "prove", proven)
        sound = contents(export_hf(run, place / "sound", shard_size=SHARD_BYTES).path)
    return run, sound, proofs


@pytest.fixture
def run(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a test; its exports are not loaded again: what a fault leaves is held to a sound one."""
    monkeypatch.setattr(hf, "prove", lambda plan, *given: made[2][plan.dtype])
    return shutil.copytree(made[0], tmp_path / "run")


@pytest.fixture
def sound(made: Made) -> dict[str, bytes]:
    return made[1]


def export(run: Path) -> Path:
    return export_hf(run, shard_size=SHARD_BYTES).path


@pytest.mark.slow("1", "100", "10000")
@pytest.mark.parametrize("room", (0, 1, 100, 300, 1000, 3000, 10_000, 40_000))
def test_no_file_may_grow_beyond_so_many_bytes(run: Path, room: int) -> None:
    """What a full disk does to every write of every library, wherever in a file it is."""
    before = contents(run)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(MachineError) as failure:
            export(run)
        assert failure.value.exit_code == 4
        assert os.strerror(errno.EFBIG) in failure.value.message

    assert wait(fork(work)) == 0
    assert os.listdir(run / "exports") == []
    assert {path: data for path, data in contents(run).items() if not path.startswith("exports/")} == before


def failing(name: str, code: int, first: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every call of `os.NAME` from the `first` on fail; returns the calls so far."""
    real: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) >= first:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.slow("write-28-10", "fsync-5-10", "sendfile-28-2", "mkdir-30-1")
@pytest.mark.parametrize(
    ("name", "code", "least"),
    [
        ("write", errno.ENOSPC, 10), ("fsync", errno.EIO, 10), ("sendfile", errno.ENOSPC, 2),
        ("mkdir", errno.EROFS, 1), ("rename", errno.EIO, 1),
    ],
)  # fmt: skip
def test_an_error_at_every_call(run: Path, sound: dict[str, bytes], name: str, code: int, least: int) -> None:
    before = contents(run)
    final = run / "exports" / "step-7"
    failures = 0
    stride = 3 if name == "write" and "TUNER_TEST_EVERY_ROW" not in os.environ else 1
    while True:
        with pytest.MonkeyPatch.context() as patch:
            failing(name, code, failures * stride + 1, patch)
            try:
                export(run)
                break
            except MachineError as error:
                failures += 1
                assert os.strerror(code) in error.message
                assert error.exit_code == 4
        if final.exists():  # published, and then its parent could not be flushed, or no link lead to it
            assert name in ("fsync", "rename") and contents(final) == sound
            shutil.rmtree(final)
        elif name in ("write", "sendfile"):
            assert os.listdir(run / "exports") == []
        assert {path: data for path, data in contents(run).items() if not path.startswith("exports/")} == before
    assert contents(final) == sound
    assert sorted(os.listdir(run / "exports")) == ["latest", "step-7"]
    assert failures * stride >= least


def test_a_disk_without_room_is_known_before_anything_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors.files, "free_bytes", lambda path: 1000)
    with pytest.raises(MachineError, match="the export needs .* bytes, 1,000 are free"):
        export(run)
    assert os.listdir(run / "exports") == []


def test_one_that_was_published_meanwhile_is_taken_for_its_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_export(run, options=ExportOptions(shard_size=SHARD_BYTES))
    export(run)
    report = hf.run_export(plan)
    assert report.already_exported
    assert sorted(os.listdir(run / "exports")) == ["latest", "step-7"]


def test_an_unfinished_export_that_still_runs_is_not_swept(run: Path) -> None:
    ready = run.parent / "ready"

    def work() -> None:
        def before(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync" and list((run / "exports").glob(".tmp-*")):
                ready.touch()
                signal.pause()

        shim(before, CALLS)
        export(run)

    child = fork(work)
    try:
        while not ready.exists():
            pass
        export(run)
        assert len(os.listdir(run / "exports")) == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(run / "exports" / "step-7")
    export(run)
    assert sorted(os.listdir(run / "exports")) == ["latest", "step-7"]
