"""A staged state is the one that was, its memory is used again, and saved from it the bytes are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.states import equal, full_state
from tests.fixtures.constructors import replace_constructor
from tuner.checkpoint.load import content_sha256, read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.checkpoint.staging import Staging
from tuner.errors import MachineError
from tuner.runtime.device import forget_cuda_error


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
