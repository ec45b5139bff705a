"""GELU as llama.cpp computes it on a CPU: read off a table of float16 (ggml-cpu/vec.h: ggml_vec_geglu_f32)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from tuner.model import transformers_private as here

_END = 10.0
"""Beyond it GELU is its input, or 0, and no table is read."""
_NOISE = 2e-6
"""Of the inputs' root mean square: how far two programs that add in float32 are apart after some layers."""


class TableGelu(torch.nn.Module):
    """The tanh approximation at the input rounded to float16, rounded to float16; float32 in and out."""

    draw: torch.Generator | None = None
    """What moves inputs by float32's rounding, so that some are read one step of the table away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What ggml gives for ``x`` of any shape."""
        if self.draw is not None:
            signs = torch.randint(0, 2, x.shape, generator=self.draw) * 2 - 1
            x = x + signs * (_NOISE * x.square().mean().sqrt())
        read = functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x.abs() < _END, read, x.clamp(min=0))


def read_off_a_table(model: torch.nn.Module) -> torch.nn.Module:
    """The model with every GELU as ggml's."""
    found = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children()
        if isinstance(child, here.GELUTanh)
    ]  # fmt: skip
    assert found, "the table of families says that it has GELU"
    for parent, name in found:
        setattr(parent, name, TableGelu())
    return model


@contextmanager
def other_steps(model: torch.nn.Module) -> Iterator[bool]:
    """Inside it, inputs that float32's rounding leaves undecided between two steps of the table may take the other one.

    Gives whether the model reads a table at all.
    """
    tables = [module for module in model.modules() if isinstance(module, TableGelu)]
    draw = torch.Generator().manual_seed(0)
    for table in tables:
        table.draw = draw
    try:
        yield bool(tables)
    finally:
        for table in tables:
            table.draw = None
