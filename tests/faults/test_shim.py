"""The harness itself: what it sees of Python, C++ and Rust, and what it does to a call."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.faults.supervisor import Fault, Kind, supervise
from tests.fixtures.tables import cases


def names(root: Path, trace: object) -> list[str]:
    return [f"{call.name} {call.path.removeprefix(str(root)).lstrip('/')}" for call in trace.calls]  # type: ignore[attr-defined]


def python() -> int:
    Path("a").mkdir()
    Path("a/b").write_bytes(b"0123456789")
    os.rename("a/b", "c")
    os.link("c", "d")
    os.symlink("c", "e")
    os.truncate("c", 4)
    for path in ("d", "e"):
        os.unlink(path)
    os.rmdir("a")
    return 7


def test_calls_are_seen_in_order_with_their_files(tmp_path: Path) -> None:
    trace = supervise(python, tmp_path, record=True)
    assert trace.code == 7
    assert names(tmp_path, trace) == cases(__file__, "calls_of_python")
    assert trace.calls[2].data == b"0123456789"
    assert (trace.calls[4].other, trace.calls[5].other) == (str(tmp_path / "c"), str(tmp_path / "d"))


def rust() -> int:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, "x.safetensors")
    return 0


def arrow() -> int:
    import pyarrow as pa

    with pa.OSFile("x.arrow", "wb") as sink, pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])) as writer:
        writer.write_table(pa.table({"a": [1, 2]}))
    return 0


def thread() -> int:
    one = threading.Thread(target=lambda: torch.save(torch.ones(3), "x.pt"))
    one.start()
    one.join()
    return 0


def process() -> int:
    return subprocess.run([sys.executable, "-S", "-c", "open('x', 'w').write('y')"], check=False).returncode


@pytest.mark.parametrize("work", [rust, arrow, thread, process])
def test_writes_of_any_language_thread_and_process_are_seen(tmp_path: Path, work: object) -> None:
    trace = supervise(work, tmp_path)  # type: ignore[arg-type]
    assert trace.code == 0
    assert sum(call.size for call in trace.calls if call.kind == "write") >= sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )


def write_ten() -> int:
    with open("x", "wb", buffering=0) as file:
        try:
            return file.write(b"0123456789")
        except OSError as error:
            return 100 + (error.errno or 0)


@pytest.mark.parametrize(
    ("kind", "code", "left"),
    [("kill", -9, b""), ("tear", -9, b"01234"), ("full", 128, b""), ("error", 105, b""), ("short", 5, b"01234")],
)
def test_what_a_fault_does(tmp_path: Path, kind: Kind, code: int, left: bytes) -> None:
    trace = supervise(write_ten, tmp_path, Fault(2, kind))
    assert (trace.code, (tmp_path / "x").read_bytes(), trace.struck_at) == (code, left, 2)


def test_a_full_disk_stays_full_and_may_be_tidied(tmp_path: Path) -> None:
    def work() -> int:
        (tmp_path / "x").touch()
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "x").write_bytes(b"1")
        (tmp_path / "x").unlink()
        return 3

    assert supervise(work, tmp_path, Fault(3, "full")).code == 3


def test_all_processes_die_together_or_the_one_alone(tmp_path: Path) -> None:
    def work() -> int:
        child = os.fork()
        if not child:
            Path("x").mkdir()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return 50 - os.waitstatus_to_exitcode(status)

    assert supervise(work, tmp_path, Fault(1, "kill")).code == -signal.SIGKILL
    assert supervise(work, tmp_path, Fault(1, "kill-one")).code == 50 + signal.SIGKILL
    assert not (tmp_path / "x").exists()


def test_what_changes_elsewhere_is_noted(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()

    def work() -> int:
        other.mkdir()
        subprocess.run(["true"], check=True)
        return 0

    trace = supervise(work, root)
    assert [call.path for call in trace.strays] == [str(other)]
    assert "program" in {call.kind for call in trace.others}
    assert trace.calls == []
