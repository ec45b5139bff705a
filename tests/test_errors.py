"""What an exception means to people: its exit code, in whichever library's words it comes."""

import pytest
import torch
import torch.distributed as dist

from tuner.errors import ExitCode, MachineError, MemoryLimitError, as_tuner_error, counted, is_out_of_memory
from tuner.runtime.process import of_rank

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {} (run with NCCL_DEBUG=INFO for details)"
UNHANDLED = NCCL.format("unhandled cuda error") + (
    ", NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with ..."
NO_MEMORY: list[tuple[type[Exception], str, str]] = [
    (MemoryError, "", "MemoryError"),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "CUDA out of memory."),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
     "tried to allocate 80000000000000 bytes. Error code 12 (Cannot allocate memory)", "can't allocate memory"),
    (RuntimeError, "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", "not enough memory"),
    (torch.AcceleratorError, "CUDA error: out of memory" + ADVICE, "CUDA error: out of memory"),
    (RuntimeError, "CUDA driver error: out of memory", "CUDA driver error: out of memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUBLAS_STATUS_ALLOC"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "ALLOCATION_FAILED"),
    (RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", "cusolver"),
    (RuntimeError, "Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: out of memory"),
    (dist.DistBackendError, UNHANDLED + "Failed to CUDA calloc 6291456 bytes", "Failed to CUDA calloc 6291456 bytes"),
    (dist.DistBackendError, UNHANDLED + "Failed to CUDA host alloc 4194304 bytes", "Failed to CUDA host alloc"),
    (dist.DistBackendError, UNHANDLED + "Cuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
    (dist.DistBackendError, UNHANDLED + "Cuda failure 'out of memory'", "Cuda failure 'out of memory'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "shown"), NO_MEMORY)
def test_every_library_s_words_for_a_full_memory(kind: type[Exception], text: str, shown: str) -> None:
    error = kind(text)
    assert is_out_of_memory(error)
    known = as_tuner_error(error)
    assert (type(known), known.exit_code) == (MemoryLimitError, ExitCode.MEMORY)
    assert known.message.startswith("out of memory: ") and shown in known.message
    assert isinstance(of_rank(1, error), MemoryLimitError), "the other ranks are told so, too"


OTHERS: list[tuple[type[Exception], str]] = [
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (torch.AcceleratorError, "CUDA error: an illegal memory access was encountered" + ADVICE),
    (RuntimeError, "out of resource: shared memory, Required: 262144, Hardware limit: 232448."),
    (RuntimeError, "Triton Error [CUDA]: misaligned address"),
    (dist.DistBackendError, UNHANDLED + "Cuda failure 700 'an illegal memory access was encountered'"),
    (ValueError, "CUDA out of memory"),
]


@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_other_errors_are_not_taken_for_one(kind: type[Exception], text: str) -> None:
    assert not is_out_of_memory(kind(text))
    assert as_tuner_error(kind(text)).exit_code == ExitCode.BUG


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism ..."
    )
    known = as_tuner_error(error)
    assert isinstance(known, MachineError) and known.exit_code == ExitCode.ENVIRONMENT
    assert known.message == "train.deterministic: cumsum_cuda_kernel has no deterministic kernel on this device"
    assert known.hint is not None and "train.deterministic: false" in known.hint


def test_one_of_a_thing_is_not_several() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1204)] == ["0 rows", "1 row", "2 rows", "1,204 rows"]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]
