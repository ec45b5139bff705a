"""A stand-in for a CUDA device that need not be here, while a step is traced on fakes of its tensors.

Fakes lie on the CPU, since torch without CUDA has no backward pass for others; kernels are chosen as on CUDA. Those of
Triton do nothing: what they would write to is there already. The one place where a trace changes what it traces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tuner.runtime.device import traced_for


class Properties:
    """What kernels ask of a device to choose their sizes; the numbers of an H100."""

    name = "stand-in"
    major, minor = 9, 0
    multi_processor_count = 132


@contextmanager
def cuda_stand_in() -> Iterator[None]:
    """Within, kernels are chosen as on CUDA, and no Triton kernel runs."""
    answers: dict[str, Any] = {
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "get_device_properties": lambda device=None: Properties,
    }
    with ExitStack() as stack:
        stack.enter_context(traced_for("cuda"))
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_no_kernels())
        yield


@contextmanager
def unchanged_modules(root: nn.Module) -> Iterator[None]:
    """Afterwards, the modules that define the model's classes are what they were: liger's patches reach all of them."""
    names = {type(module).__module__ for module in root.modules()}
    before = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.")}
    try:
        yield
    finally:
        for name, values in before.items():
            vars(sys.modules[name]).update(values)


@contextmanager
def _no_kernels() -> Iterator[None]:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with patch.object(JITFunction, "run", lambda *args, **kwargs: None):
        yield
