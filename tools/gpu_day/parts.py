"""The parts of the day, the most valuable first, and how one of them runs."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.gpu_day.record import Day


@dataclass(frozen=True)
class Part:
    """One part: a function of this package, its limit in seconds on a GPU, and what it shows."""

    name: str
    function: str
    limit_s: int
    covers: str

    def load(self) -> Callable[[Day], None]:
        """The function; its libraries are loaded here."""
        module, _, function = self.function.partition(".")
        found: Callable[[Day], None] = getattr(importlib.import_module(f"tools.gpu_day.{module}"), function)
        return found


PARTS = (
    Part("machine", "parts.machine", 60, "device, driver and versions"),
    Part("rates", "rates.rates", 60, "products, attention by each kernel, loss, a copy: what predictions are made of"),
    Part("steps", "steps.steps", 420, "steps as they were predicted before, measured"),
    Part("peer", "peer.cost", 560, "TRL at its defaults and in four configurations, in turns with us"),
    Part("traces", "steps.traces", 150, "where a step goes, by kernel"),
    Part("starts", "starts.starts", 300, "what is before the first step; methods with a reference"),
    Part("attention", "attention.correctness", 150, "values and gradients of packed attention, of every shape"),
    Part(
        "layers", "layers.correctness", 300, "gradients of layers recomputed, compiled, by liger's kernels, with LoRA"
    ),
    Part("arithmetic", "arithmetic.correctness", 90, "loss kernels, optimizers, page-locked copies"),
    Part("first", "runs.first", 420, "a user's first run: 0.6B in full and 8B LoRA, defaults"),
    Part("resume", "runs.resume", 300, "saves beside steps, resuming bit for bit, deterministic kernels"),
    Part("predicted", "runs.predicted", 420, "predicted against measured memory and time"),
    Part("small-card", "runs.small_card", 180, "8B LoRA where 23 GiB are to be had"),
    Part("choices", "choices.cost", 420, "gathers, loss, recomputing and compiling, sample answers"),
    Part("attention-cost", "attention.cost", 60, "the bound of lengths that the kernel is given"),
)
LIBRARIES = ("torch", "transformers", "peft", "liger_kernel", "triton", "trl", "flash-attn-4")


def machine(day: Day) -> None:
    """What the figures are made on."""
    import os
    import sys
    import time

    import torch

    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    device: dict[str, object] = {"device": day.device, "cores": os.cpu_count()}
    if day.on_gpu:
        properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
        device |= {
            "device": properties.name, "compute capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda, "GiB": round(total / 2**30, 1), "free GiB": round(free / 2**30, 1),
        }  # fmt: skip
    device["date"] = time.strftime("%Y-%m-%d")
    day.say("machine", python=sys.version.split()[0], **device, **versions)
