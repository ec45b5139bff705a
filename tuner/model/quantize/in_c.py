"""Codes and weights made by the kernels compiled for this processor: the bits of plain torch, sooner."""

import torch

from tuner.model.native import library
from tuner.model.quantize import int8, nf4

TYPES = (torch.bfloat16, torch.float32)
"""What the kernels read and write as weights."""


def encode(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tiny: float, huge: float) -> int | None:
    """Fill codes and scales, both dense, of a weight ``[rows, columns]`` of :data:`TYPES`.

    Blocks of magnitudes below ``tiny`` are zeros. Returns the first row that holds what is no number up to
    ``huge``. Raises MachineError where there is no kernel.
    """
    weight = weight.contiguous()
    bad = library.call(
        "quantize",
        "Quantize",
        weight=weight,
        bounds=nf4.bounds(weight.device) if codes.dtype == torch.uint8 else None,
        codes=codes, scales=scales, rows=len(weight), columns=weight.shape[1], code_stride=codes.shape[1],
        blocks=scales.shape[1], is_bfloat=weight.dtype == torch.bfloat16, tiny=tiny, huge=huge,
    )
    return bad - 1 if bad else None


def decode(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill a dense ``[rows, columns]`` of :data:`TYPES`. Rows of codes and scales may lie apart, each of them dense.

    Raises MachineError where there is no kernel.
    """
    library.call(
        "dequantize", "Dequantize", codes=codes, scales=scales, output=output, rows=len(codes),
        values=nf4.values(codes.device) if codes.dtype == torch.uint8 else None, columns=output.shape[1],
        code_stride=codes.stride(0), scale_stride=scales.stride(0), is_bfloat=output.dtype == torch.bfloat16,
        step=int8.STEP,
    )
