"""Decoder layers compiled one by one (torch.compile): one program serves all that are alike, for every packing.

Embedding, output layer and loss stay as they are. Attention over documents is one opaque operation, and where documents
lie is data to it, so that no packing compiles anew.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from tuner.model.build import decoder_blocks
from tuner.model.documents import Padding
from tuner.model.root import CausalLM

BACKEND = "inductor"


def compile_blocks(root: CausalLM, padding: Padding) -> None:
    """Compile the decoder layers for training, in place; after recomputing is applied and before sharding.

    Every microbatch is filled up to the size of ``padding``, the one for which the layers are compiled.
    """
    for module in root.modules():
        if isinstance(module, DoraLinearLayer):
            _ease_tracing()
            # It is cleared in every forward and, as peft sets it, never filled. A checkpoint that is compiled may not
            # change what lies outside it.
            module._cache_clear = _nothing  # type: ignore[method-assign]
    for block in decoder_blocks(root.model):
        _wrap(block)
    root.padding = padding


def compiler_problem(device: str) -> str | None:
    """What is missing on this machine to compile for a kind of device, ``cpu`` or ``cuda``; None where nothing is."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's headers are not installed (Python.h)"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _wrap(block: nn.Module) -> None:
    forward = block.forward
    compiled: Callable[..., Any] = torch.compile(forward, backend=BACKEND, dynamic=False)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Evaluation and sampling come in many shapes and are rare: they run as they are.
        return compiled(*args, **kwargs) if block.training else forward(*args, **kwargs)

    block.forward = run


@cache
def _ease_tracing() -> None:
    """Tell the compiler what peft's function for weights of any kind gives for one that is not quantised: itself.

    It asks for the kind by the name of the tensor's class, which the compiler of torch 2.13 cannot follow.
    """

    @torch.compiler.substitute_in_graph(dequantize_module_weight)
    def weight(module: nn.Module) -> nn.Parameter:
        found: nn.Parameter = module.weight  # type: ignore[assignment]
        return found


def _nothing() -> None:
    pass
