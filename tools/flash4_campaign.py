"""Compile what tuner asks of flash attention 4 for GPUs that are not here, forward and backward.

    python -m tools.flash4_campaign [--archs 90 100 120] [--out FILE] [--packages DIR]

Heads of 43 models, in windows, with soft caps, with sinks, all at once, and with sums in one order: the operation's own
code runs on fake tensors, and its package compiles each kernel with the assembler for the device. A case that
`flash4_attention.problem` refuses is counted as such, by its words, and its kernel is not tried. Prints a line for
each, those with the kernels of one before as such; exits with 1 where one that is taken does not compile. With `--out`
it continues where it stopped. The packages are installed into a directory of their own, without those of CUDA.
"""

import json
import os
import site
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.commands import Results, asked, read_lines
from tuner.model import flash4_attention
from tuner.runtime.deterministic import deterministic
from tuner.runtime.device import traced_for

PLACE = Path(__file__).resolve().parents[1] / ".demo" / "flash4"
PACKAGES = (
    "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu13", "quack-kernels", "apache-tvm-ffi", "torch-c-dlpack-ext", "einops", "cuda-python",
    "cuda-bindings", "cuda-pathfinder", "cuda-core",
)  # fmt: skip
TOKENS, LONGEST = 8192, 4096
ARCHS = (90, 100, 120)
HEADS: dict[str, tuple[int, int, int, int]] = {
    "Llama 3.2 1B": (32, 8, 64, 64), "Llama 3.2 3B": (24, 8, 128, 128), "Llama 3.1 8B": (32, 8, 128, 128),
    "Llama 3.1 70B": (64, 8, 128, 128), "Llama 2 7B": (32, 32, 128, 128), "Llama 4 Scout": (40, 8, 128, 128),
    "Qwen2.5 0.5B": (14, 2, 64, 64), "Qwen2.5 1.5B": (12, 2, 128, 128), "Qwen2.5 3B": (16, 2, 128, 128),
    "Qwen2.5 7B": (28, 4, 128, 128), "Qwen2.5 32B": (40, 8, 128, 128), "Qwen3 0.6B": (16, 8, 128, 128),
    "Qwen3 4B": (32, 8, 128, 128), "Qwen3 30B-A3B": (32, 4, 128, 128), "Qwen3 235B": (64, 4, 128, 128),
    "Qwen3-Next": (16, 2, 256, 256), "SmolLM2 135M": (9, 3, 64, 64), "SmolLM2 360M": (15, 5, 64, 64),
    "SmolLM3": (16, 4, 128, 128), "Mistral 7B": (32, 8, 128, 128), "Mixtral 8x22B": (48, 8, 128, 128),
    "Gemma 2B": (8, 1, 256, 256), "Gemma 2 2B": (8, 4, 256, 256), "Gemma 2 27B": (32, 16, 128, 128),
    "Gemma 3 1B": (4, 1, 256, 256), "Gemma 3 27B": (32, 16, 128, 128), "Gemma 4": (8, 1, 512, 512),
    "gpt-oss 20B": (64, 8, 64, 64), "DeepSeek-V3": (128, 128, 192, 128), "DeepSeek-V2 Lite": (16, 16, 192, 128),
    "Phi-2": (32, 32, 80, 80), "Phi-3 mini": (32, 32, 96, 96), "Phi-4": (40, 10, 128, 128),
    "GPT-2": (12, 12, 64, 64), "GPT-2 XL": (25, 25, 64, 64), "Pythia 1B": (8, 8, 256, 256),
    "OLMo 2 1B": (16, 16, 128, 128), "StableLM 2": (32, 32, 64, 64), "Falcon 7B": (71, 1, 64, 64),
    "Bloom 560M": (16, 16, 64, 64), "MiniCPM3": (40, 40, 96, 64), "odd widths": (4, 2, 20, 36),
    "tiny": (4, 2, 16, 16),
}  # fmt: skip


class Way(NamedTuple):
    """What is asked besides heads."""

    window: int = 0
    cap: float = 0.0
    has_sink: bool = False
    in_order: bool = False
    """Whether the sums of the backward pass are to be the same twice."""


PLAIN = Way()
WAYS = (Way(window=512), Way(cap=50.0), Way(has_sink=True), Way(128, 30.0, True), Way(in_order=True))
ALL_WAYS = ("Llama 3.1 8B", "Llama 3.2 1B", "Gemma 2 2B", "DeepSeek-V3", "Phi-3 mini", "OLMo 2 1B")
"""Heads that are compiled in every way; the others as their models ask."""
OWN = {
    "Gemma 2 27B": (Way(4096, 50.0), Way(0, 50.0)), "gpt-oss 20B": (Way(128, has_sink=True), Way(has_sink=True)),
    "Gemma 3 27B": (Way(1024),), "Gemma 3 1B": (Way(512),), "Mistral 7B": (Way(4096),),
    "odd widths": (Way(7, 3.0, True),),
}  # fmt: skip


def cases() -> dict[str, tuple[tuple[int, int, int, int], Way]]:
    """Heads and ways by name."""
    found = {}
    for name, heads in HEADS.items():
        for way in (PLAIN, *(WAYS if name in ALL_WAYS else OWN.get(name, ()))):
            found[f"{name} {heads} {' '.join(f'{k}={v}' for k, v in way._asdict().items() if v)}".strip()] = heads, way
    return found


def compiled(arch: int, heads: tuple[int, int, int, int], way: Way) -> dict[str, Any]:
    """Compile forward and backward; seconds of each, or why they are not taken."""
    queries, keys, width, value_width = heads
    with traced_for("cuda", generation=arch // 10), deterministic(way.in_order):
        refused = flash4_attention.problem(arch // 10, width, value_width, queries != keys, way.cap > 0, way.window > 0)
        if refused is not None:
            return {"refused": refused}
        longest: Any = LONGEST  # a tensor's value is not known on fakes
        begun = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True):
            # Filled up here: fakes of a device that torch was not built for cannot be.
            width, value_width = flash4_attention.widths(arch // 10, width, value_width, queries != keys) or (0, 0)
            sizes = ((queries, width), (keys, width), (keys, value_width))
            given = [torch.empty(TOKENS, n, d, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for n, d in sizes]
            bounds = torch.empty(5, device="cuda", dtype=torch.int32)
            asked = (bounds, longest, way.window, width**-0.5, way.cap)
            sink = torch.empty(queries, device="cuda") if has_sink(arch, way) else None
            output, normaliser = flash4_attention.flash_attention_4._init_fn(*given, *asked, sink)
            forward = time.monotonic()
            upstream = torch.empty_like(output)
            grads = flash4_attention._backward._init_fn(upstream, *given, output, normaliser, *asked)
        shapes = [tuple(tensor.shape) for tensor in (output, *grads)]
        if shapes != [(TOKENS, queries, value_width), *(tuple(tensor.shape) for tensor in given)]:
            raise RuntimeError(f"results have other shapes: {shapes}")
    return {"forward_s": round(forward - begun, 1), "backward_s": round(time.monotonic() - forward, 1)}


def prepare(arch: int) -> None:
    """Load the package for a device that is not here."""
    names = {"FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}a", "FLASH_ATTENTION_NUM_SMS": "132"}
    os.environ.update(names)
    warnings.filterwarnings("ignore", category=UserWarning)
    package = flash4_attention._package()
    from flash_attn.cute import utils

    plain = utils.from_dlpack  # its semaphores are converted by a way that takes no fake tensors
    utils.from_dlpack = lambda tensor, **options: plain(tensor, **{"enable_tvm_ffi": True, **options})
    assert package is not None


def run(arch: int, told: Results) -> int:
    """Compile for one device what is not told yet, each case in a process of its own; how many do not."""
    prepare(arch)
    failed, kernels, done = 0, dict[object, str](), {row["case"] for row in told.rows}
    for name, (heads, way) in cases().items():
        key, asked = f"sm_{arch}a {name}", kernels_of(arch, heads, way)
        first = kernels.setdefault(asked, key)
        if key in done:
            continue
        if first != key:
            told.add({"case": key, "same_kernels_as": first})
            continue
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:  # what is loaded is shared; what a case leaves behind goes with it
            try:
                found = compiled(arch, heads, way)
            except BaseException as error:  # noqa: BLE001 - the finding
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "at": traceback.format_exc()[-600:]}
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            found = json.loads(answer.read() or '{"error": "the process died"}')
        os.waitpid(child, 0)
        failed += "error" in found
        told.add({"case": key, **found})
    return failed


def kernels_of(arch: int, heads: tuple[int, int, int, int], way: Way) -> object:
    """What programs are made of: heads that share it have the same ones."""
    queries, keys, width, value_width = heads
    given = flash4_attention.widths(arch // 10, width, value_width, queries != keys)
    return given or heads, queries // keys, way._replace(window=bool(way.window), has_sink=has_sink(arch, way))


def has_sink(arch: int, way: Way) -> bool:
    """Whether the kernel is given the sinks; else they are put into its result."""
    return way.has_sink and arch // 10 not in flash4_attention.WITHOUT_SINKS


def main() -> int:
    """Run those that were asked for, a process for each device."""
    options = asked(__doc__, packages=(PLACE, "where the packages are, or are installed"), archs=list(ARCHS), out=Path)
    if not (options.packages / "flash_attn").is_dir():
        pins = Path(__file__).resolve().parents[1] / "constraints.txt"
        words = ["install", "-q", "--no-deps", "--target", str(options.packages), "-c", str(pins), *PACKAGES]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    site.addsitedir(str(options.packages.resolve()))
    told = Results(options.out)
    failed = sum("error" in one for one in told.rows)
    for arch in options.archs:
        if (child := os.fork()) == 0:
            os._exit(min(run(arch, told), 250))
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if options.out is not None:
        found = read_lines(options.out)
        kinds = Counter(next(iter({"error", "refused", "same_kernels_as"} & one.keys()), "compiled") for one in found)
        print(json.dumps({"heads": len(HEADS), "cases": len(found), **kinds}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
