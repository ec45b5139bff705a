"""What trainings on CUDA need besides a device, tried: kernels, page-locked memory, the allocator, a device each."""

import os
from collections.abc import Iterator

import torch

from tuner.errors import MachineError
from tuner.model.fastest import FLASH_4, USUAL_FLASH, WAY_TO_FLASH_4, Heads, versions_for
from tuner.model.flash4_attention import problem
from tuner.model.kernels import has_liger
from tuner.runtime.before_torch import ALLOCATOR, SEGMENTS, is_wsl
from tuner.runtime.device import TO_COMPILE, forget_cuda_error, generation, triton_problem
from tuner.runtime.dist import RankInfo
from tuner.setup.machine_check import Check

LOCKED = 1 << 30
"""Bytes that are page-locked for a moment: what copies of a small model's state take."""
LESS = "model.kernels: auto takes torch's, with more memory at the output layer"


def examine_cuda() -> Iterator[Check]:
    """Try it all, where there is a CUDA device."""
    yield _liger()
    yield _attention()
    yield _page_lock()
    yield _allocator()
    if torch.cuda.device_count() > 1:
        yield _links(torch.cuda.device_count())
    if RankInfo.is_given():
        yield _own_device()


def _liger() -> Check:
    if not has_liger("llama"):
        return Check("kernels", "missing", "liger-kernel is not installed", LESS, "pip install liger-kernel")
    if (problem := triton_problem()) is not None:
        return Check("kernels", "missing", f"liger's cannot be compiled: {problem}", LESS, TO_COMPILE)
    from liger_kernel.transformers import LigerRMSNorm

    try:
        norm = LigerRMSNorm(64).to("cuda")
        right = bool(torch.isfinite(norm(torch.ones(4, 64, device="cuda"))).all())
    except Exception as error:  # noqa: BLE001 - of a compiler, of Triton or of the driver
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Check("kernels", "warning", f"liger fails on the GPU: {said}", LESS, TO_COMPILE)
    if not right:
        return Check("kernels", "broken", "liger gives numbers that are not finite on the GPU")
    return Check("kernels", "ok", "liger computes on the GPU")


def _attention() -> Check:
    """Which flash attention there is for this device; whether it is right is tried on each model's own heads."""
    major = generation(torch.cuda.current_device())
    usual = [Heads(32, 8, 128, 128, 0.0, 0.0)]  # of most models with 7 billion parameters and more
    there = versions_for(usual, major)
    if there:
        return Check("attention", "ok", f"{there[0].name}: {there[0].package} is installed")
    if problem(major, 128, 128, is_grouped=True, is_capped=False) is not None:
        return Check("attention", "ok", f"{USUAL_FLASH}: there is no later one for compute capability {major}.x")
    means = f"attention takes longer than by {FLASH_4.name}, which is for this device"
    return Check("attention", "missing", f"{USUAL_FLASH}, which torch brings", means, WAY_TO_FLASH_4)


def _page_lock() -> Check:
    block = torch.empty(LOCKED, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(block.data_ptr(), LOCKED, 0))
    if code == 0:
        cudart.cudaHostUnregister(block.data_ptr())
        return Check("page-lock", "ok", f"{LOCKED >> 20:,} MiB of host memory can be page-locked")
    forget_cuda_error(torch.device("cuda", torch.cuda.current_device()))
    return Check(
        "page-lock",
        "warning",
        f"{LOCKED >> 20:,} MiB of host memory cannot be page-locked (CUDA error {code})",
        "saves in the background copy through plain memory, and training waits a little longer for them",
        "WSL allows little of it" if is_wsl() else "raise the limit: ulimit -l unlimited, or the container's",
    )


def _allocator() -> Check:
    said = os.environ.get(ALLOCATOR) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if said is not None:
        return Check("allocator", "ok", said, "" if said == SEGMENTS else "as the environment says")
    means = "memory of the device is kept in blocks of fixed size: tensors of several sizes leave holes in it"
    where = "WSL's driver has no expandable segments" if is_wsl() else "no expandable segments"
    return Check("allocator", "warning" if is_wsl() else "missing", where, means, f"export {ALLOCATOR}={SEGMENTS}")


def _links(count: int) -> Check:
    """Whether the GPUs of this machine reach each other, as groups that compute layers and rows together want it."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
    groups = f"groups of {sizes} are possible"
    if not apart:
        return Check("links", "ok", f"{count} GPUs, each reaches the others' memory: {groups}")
    one, other = apart[0]
    return Check(
        "links",
        "warning",
        f"{count} GPUs, of which {one} does not reach the memory of {other}: {groups}",
        "what parallel.tensor, sequence and expert exchange goes through the host's memory, and is waited for",
        "parallel.shard alone sends while it computes",
    )


def _own_device() -> Check:
    """Whether each of a launcher's processes on this machine has a device of its own."""
    try:
        tasks = RankInfo.from_environment().local_world_size
    except MachineError as error:
        return Check("launcher", "broken", error.message, "processes of a run do not find each other", error.hint or "")
    visible = torch.cuda.device_count()
    found = f"{tasks} process{'es' if tasks > 1 else ''} on this machine, each sees {visible} GPU{'s' * (visible > 1)}"
    if visible >= tasks:
        return Check("launcher", "ok", found)
    if visible == 1:
        return Check("launcher", "ok", found, "taken for one of its own, as SLURM binds them; a run checks that")
    return Check("launcher", "broken", found, "some would have none", "start as many processes as there are GPUs")
