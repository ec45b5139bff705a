"""The weight that codes stand for, made by the fastest way there is: in C on the CPU, in Triton on CUDA.

Every way gives the bits of :func:`tuner.model.quantize.codes.dequantize`.
"""

from functools import cache

import torch

from tuner.model.quantize import codes as plain
from tuner.model.quantize import in_c
from tuner.runtime.device import is_traced, target, triton_problem


@torch.library.custom_op("tuner::dequantized", mutates_args=())
def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype, native: bool
) -> torch.Tensor:
    """The whole weight ``[out, columns]`` in ``dtype``, as one operation, for those who cannot do with tiles.

    ``native`` as for :func:`fill`.
    """
    output = codes.new_empty(codes.shape[0], columns, dtype=dtype)
    fill(output, codes, scales, native)
    return output


@dequantized.register_fake
def _weight(codes: torch.Tensor, _: torch.Tensor, columns: int, dtype: torch.dtype, native: bool) -> torch.Tensor:
    return codes.new_empty(codes.shape[0], columns, dtype=dtype)


def fill(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, native: bool = False) -> None:
    """Make the weight ``[out, columns]`` in ``output``, dense; in C on the CPU where ``native``.

    Codes and scales may be cut from larger ones: any rows, and columns from a multiple of 64 on. Raises MachineError
    where the compiled kernel cannot be had.
    """
    codes, scales = _dense_rows(codes), _dense_rows(scales)
    if target(codes) == "cuda" and (is_traced() or _triton_works()):
        launch(output, codes, scales)
    elif native and codes.device.type == "cpu" and output.dtype in in_c.TYPES:
        in_c.decode(output, codes, scales)
    else:
        output.copy_(plain.dequantize(codes, scales, output.shape[1], output.dtype))


def launch(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Run the kernel in Triton; what is traced has no numbers to be made, and may be traced without Triton."""
    if not is_traced():
        from tuner.model.quantize import triton_rows

        triton_rows.fill(output, codes, scales)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, of whose rows the numbers lie one after the other: kernels know no other."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


@cache
def _triton_works() -> bool:
    return triton_problem() is None
