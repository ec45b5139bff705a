"""A staged state is the one that was, its memory is used again, and what is saved from it has the same bytes;
copies from a CUDA device, on a stand-in for `torch.cuda`: whose device, in what order, and refused.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import equal, full_state
from tests.fixtures import trainings
from tests.fixtures.constructors import replace_constructor
from tests.fixtures.cuda_stub import DEVICE, CudaStub, cuda_stub
from tests.run.tasks.test_save import BESIDE, saved
from tuner.checkpoint.load import content_sha256, read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.checkpoint.staging import Staging
from tuner.errors import MachineError
from tuner.run.background import Background
from tuner.runtime.console import Console
from tuner.runtime.device import forget_cuda_error
from tuner.train.optimizer import OptimizerSet


def test_a_state_saved_from_its_copy_is_the_state_before_it_changed(tmp_path: Path) -> None:
    state, staging = full_state(1), Staging()
    at_once = save(CheckpointDir(tmp_path / "at-once", "r"), 1, state, {}, {})
    staged = staging.stage(state)
    for tensor in state.values():
        tensor.zero_()
    later = save(CheckpointDir(tmp_path / "later", "r"), 1, state, {}, {}, staged=staged)
    assert equal(dict(read_tensors(open_checkpoint(later))), full_state(1))
    assert content_sha256(open_checkpoint(later)) == content_sha256(open_checkpoint(at_once))
    for name in ("index.json", "rank-0000-of-0001.safetensors"):
        assert (later / name).read_bytes() == (at_once / name).read_bytes()


def test_what_is_staged_in_place_is_not_copied() -> None:
    state, staging = full_state(1), Staging()
    whole = staging.stage(state)
    size, moments = staging.nbytes, [name for name in state if name.startswith("optimizer/")]
    assert moments and not whole.written.is_set()
    staging.release()
    staged = staging.stage(state, in_place=moments)
    assert [*staged.tensors] == [*state] and 0 < staging.nbytes < size
    assert all((staged.tensors[name] is state[name]) == (name in moments) for name in state)


def test_the_memory_is_used_again_and_grows_where_more_is_wanted() -> None:
    staging, state = Staging(), full_state(1)
    staging.reserve(state)
    size = staging.nbytes
    first = staging.stage(state).tensors["model/weight"].data_ptr()
    assert staging.stage(full_state(2)).tensors["model/weight"].data_ptr() == first
    assert staging.nbytes == size
    more = staging.stage({**state, "optimizer/more": torch.ones(10**5)})
    assert staging.nbytes >= size + 4 * 10**5
    assert torch.equal(more.tensors["model/weight"], state["model/weight"])
    staging.release()
    assert staging.nbytes == 0


def test_memory_that_is_not_there_is_an_error_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    state, real = full_state(1), torch.empty

    def none(*args: Any, **options: Any) -> Any:
        if args[0]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*args, **options)

    staging = Staging()
    replace_constructor(monkeypatch, "empty", none)
    with pytest.raises(MachineError, match=r"no memory for a copy of the state to save \([\d,]+ bytes\)"):
        staging.reserve(state)


@pytest.mark.gpu
def test_a_device_copies_beside_its_work_and_changes_nothing_before() -> None:
    state = {f"model/{number}": torch.full((4096, 4096), float(number), device="cuda") for number in range(8)}
    staging = Staging()
    staging.reserve(state)
    for _ in range(3):
        for number, tensor in enumerate(state.values()):
            tensor.fill_(number)
        staged = staging.stage(state)
        torch.cuda.current_stream().wait_event(staged.copied)
        for tensor in state.values():
            tensor.zero_()
        staged.wait()
        assert all(bool((staged.tensors[f"model/{number}"] == number).all()) for number in range(8))
        assert staged.tensors["model/0"].is_pinned()
    staging.release()


@pytest.mark.gpu
def test_a_refused_call_leaves_no_error_for_the_next_kernel() -> None:
    block, device = torch.empty(1 << 20, dtype=torch.uint8), torch.device("cuda", 0)
    cudart: Any = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(block.data_ptr(), block.numel(), 1)) == 0
    assert int(cudart.cudaHostRegister(block.data_ptr(), block.numel(), 1)) != 0, "it is registered already"
    forget_cuda_error(device)
    assert torch.zeros(8, device=device).add_(1).sum().item() == 8
    cudart.cudaHostUnregister(block.data_ptr())


NOT_SUPPORTED = 801  # cudaErrorNotSupported


@pytest.fixture
def cuda() -> Iterator[CudaStub]:
    with cuda_stub() as stub:
        yield stub


def test_a_thread_makes_the_device_its_own_before_anything_else(cuda: CudaStub) -> None:
    staging, thread = Staging(), Background[None]("save", DEVICE)
    thread.start(lambda: staging.reserve(full_state(1)))
    thread.finish()
    assert cuda.names("save") == ["set_device", "cudaHostRegister"]
    assert {call.device for call in cuda.calls if call.thread == "save"} == {DEVICE.index}
    assert sum(cuda.locked.values()) == staging.nbytes
    staging.release()
    assert cuda.locked == {}


def test_the_copies_wait_for_what_came_before_and_their_end_is_on_their_stream(cuda: CudaStub) -> None:
    staging = Staging()
    staged = staging.stage(full_state(1))
    queued = [(call.name, call.on) for call in cuda.calls if call.on is not None]
    assert queued == [("wait_stream", ("copies", "current")), ("record", ("copies", staged.copied))]
    staged.wait()
    assert cuda.names()[-1] == "event.synchronize"


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 2])
def test_a_refused_page_lock_leaves_plain_memory_and_no_error_behind(code: int) -> None:
    state = full_state(1)
    with cuda_stub(refuse=code) as cuda:
        staging = Staging()
        staging.reserve(state)
        assert re.match(rf"CUDA cannot page-lock [\d,]+ bytes of host memory \(error {code}\)", str(staging.problem))
        assert cuda.pending == {}, "the next kernel of this thread would report it"
        staged = staging.stage(state)
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in state.items())
        staging.release()
        assert "cudaHostUnregister" not in cuda.names()


def test_python_s_word_for_a_full_memory_counts_too(cuda: CudaStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **options: Any) -> Any:
        if args[0]:
            raise MemoryError
        return real(*args, **options)

    staging, state, real = Staging(), full_state(1), torch.empty
    replace_constructor(monkeypatch, "empty", none)
    with pytest.raises(MachineError, match="no memory for a copy of the state"):
        staging.reserve(state)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    trainings.prepare(tmp_path, 1)
    return tmp_path


@pytest.mark.slow
def test_a_run_s_saves_from_a_device(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {**BESIDE, "train__duration": "10 steps", "checkpoint__every": "2 steps"}
    at_once = trainings.launch(workplace, name="at-once", **{**flags, "checkpoint__async_save": "false"})
    real = OptimizerSet.step
    with cuda_stub() as cuda:
        monkeypatch.setattr(
            OptimizerSet, "step", lambda *args, **options: (cuda.note("update"), real(*args, **options))[1]
        )
        beside = trainings.launch(workplace, name="beside", **flags)
    assert saved(beside.run_dir) == saved(at_once.run_dir)
    assert {call.device for call in cuda.calls} == {DEVICE.index}, "no call makes a context on another device"
    threads = {call.thread for call in cuda.calls}
    assert threads == {"save", threading.main_thread().name}
    in_order = [call for call in cuda.calls if call.name in ("record", "wait_event", "update")]
    fences = [i for i, call in enumerate(in_order) if call.name == "wait_event"]
    staged = [i for i, call in enumerate(in_order) if call.name == "record"]
    # The last save is waited for and has no update after it; all the others come before the next one.
    assert len(staged) == 5 and fences == [i + 1 for i in staged[:-1]]
    assert all(in_order[i + 1].name == "update" for i in fences)
    assert all(in_order[i].on[1] is in_order[i - 1].on[1] for i in fences)  # type: ignore[index]


def test_a_run_says_once_that_its_copies_are_not_page_locked(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda console, text: said.append(text))
    with cuda_stub(refuse=NOT_SUPPORTED) as cuda:
        flags = {"train__stop_after": "4 steps", "checkpoint__every": "2 steps"}
        run = trainings.launch(workplace, **BESIDE, **flags).run_dir
    assert [*saved(run)] == [4, 2]
    assert cuda.names().count("record") == 2, "the last one, too, goes through the memory that is there for copies"
    assert [text[:21] for text in said if "page-lock" in text] == ["CUDA cannot page-lock"]


def launched_without_room(workplace: Path, monkeypatch: pytest.MonkeyPatch, is_auto: bool) -> Any:
    def full(staging: Staging, tensors: Any) -> None:
        raise MachineError("no memory for a copy of the state to save (8 bytes)", hint="write async_save: false")

    from tuner.setup import resolve

    flags = {"train__stop_after": "4 steps", "checkpoint__every": "2 steps"} | ({} if is_auto else BESIDE)
    monkeypatch.setattr(Staging, "reserve", full)
    monkeypatch.setattr(resolve, "_async_save", lambda *args: (True, "cuda"))
    return trainings.launch(workplace, **flags)


def test_without_memory_for_copies_a_run_that_did_not_ask_saves_at_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda console, text: said.append(text))
    result = launched_without_room(workplace, monkeypatch, is_auto=True)
    (text,) = [text for text in said if "memory" in text]
    assert text == "no memory for a copy of the state to save (8 bytes): training waits for each save"
    assert [*saved(result.run_dir)] == [4, 2]


def test_without_memory_for_copies_a_run_that_asked_for_them_ends(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="no memory for a copy of the state"):
        launched_without_room(workplace, monkeypatch, is_auto=False)
