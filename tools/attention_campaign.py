"""Attention on CUDA, proven without a GPU: models through stand-in kernels, Triton's interpreter, Triton's compiler.

    python -m tools.attention_campaign [branch] [interpreter] [compiler]

`branch`: tiny models of seven kinds x recomputing levels x adapters x eager, traced and compiled layers give the
gradients of the blocks of products, through kernels that refuse what FlashAttention 2 refuses. `interpreter`: our
Triton kernels give the blocks' values and gradients for many widths, groups, windows and documents. `compiler`: each of
these kernels is compiled for every generation of GPUs, and its blocks fit the shared memory of the least of them. Exits
with 1 where one fails.
"""

import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.fixtures.commands import printed
from tests.model.cuda_branch import LORA, check, triton_stand_in
from tests.model.test_triton_attention import COMPARE
from tools.commands import asked, judged, workplace

KINDS = ("llama", "qwen3", "mistral", "gemma3", "deepseek", "narrow", "gemma2")
LEVELS = ("none", "selective", "full")
BACKENDS = ("", "aot_eager", "inductor")
GENERATIONS = (80, 86, 89, 90, 100, 120)
LEAST_SHARED = 99 << 10
"""Bytes that a program may have on sm_86, sm_89 and sm_120; others have 163 KiB and more."""


def branch() -> Iterator[str]:
    """Problems of the models' gradients."""
    for kind, level, lora, backend in itertools.product(KINDS, LEVELS, (None, LORA), BACKENDS):
        if (lora is not None and kind == "deepseek") or (backend == "inductor" and (lora or level == "full")):
            continue  # peft takes the experts for its dense layers; a compilation takes half a minute
        name, started = f"{kind} {level} {'lora' if lora else 'full model'} {backend or 'eager'}", time.monotonic()
        torch._dynamo.reset()
        counters.clear()
        try:
            with workplace() as directory, triton_stand_in():
                # Inductor keeps float32 between operations where eager rounds to bf16.
                check(kind, directory, level, lora, backend, 2e-2 if backend == "inductor" else 1e-3)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is the finding
            yield f"{name}: {type(error).__name__}: {str(error)[:300]}"
        else:
            graphs = f", graphs {counters['stats']['unique_graphs']}" if backend else ""
            print(f"ok  {name}{graphs}, {time.monotonic() - started:.1f} s", flush=True)


def interpreter() -> Iterator[str]:
    """Problems of the kernels' numbers."""
    rng, cases = random.Random(0), []
    for width, value_width in itertools.product((8, 20, 64, 96, 256), (8, 64, 256)):
        keys, group = rng.choice((1, 2)), rng.choice((1, 2, 3))
        lengths = [rng.randint(1, 200) for _ in range(rng.randint(1, 4))]
        window, cap = rng.choice((0, 1, 17, 300)), rng.choice((0.0, 5.0))
        cases.append((keys * group, keys, width, value_width, lengths, window, cap))
    found: dict[str, float] = {}
    for dtype in ("float32", "float16"):
        found |= printed(COMPARE, "cpu", dtype, json.dumps(cases), TRITON_INTERPRET="1")
    for case, far in found.items():
        print(f"{far:.1e}  {case}", flush=True)
        if far > (2e-6 if case.startswith("float32") else 2e-3):
            yield f"{case}: {far:.1e} from the blocks"


def compiler() -> Iterator[str]:
    """Problems of the kernels' programs."""
    from tuner.model import triton_kernels
    from tuner.model.triton_attention import WIDEST

    kernels = (triton_kernels._forward, triton_kernels._backward_queries, triton_kernels._backward_keys)
    for dtype in (torch.bfloat16, torch.float32):  # those of fp16 are bf16's
        widest = WIDEST[dtype]
        for width in (32, 64, 128, 256, 512):
            if width > widest:
                continue
            for number, kernel in enumerate(kernels):
                sizes = triton_kernels.blocks_of(width, dtype)[number]
                for generation in GENERATIONS:
                    shared = compiled(kernel, sizes, width, dtype, generation)
                    name = f"{kernel.__name__} {dtype} {width} {tuple(sizes)} sm_{generation}"
                    print(f"{shared / 1024:5.0f} KiB  {name}", flush=True)
                    if shared > LEAST_SHARED:
                        yield f"{name}: {shared / 1024:.0f} KiB of shared memory"


def compiled(kernel: Any, sizes: Any, width: int, dtype: torch.dtype, generation: int) -> int:
    """Compile a kernel with Triton's own assembler; bytes of shared memory that its programs take."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    constants = {"SCALE": 0.1, "CAP": 50.0, "WINDOW": 4096, "GROUP": 2, "D": width, "D_VALUE": width}
    constants |= {"BLOCK_D": width, "BLOCK_V": width, "OWN": sizes.own, "OTHERS": sizes.others, "PRECISION": "ieee"}
    types = {name: pointer for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr") | {"bounds": "*i32"}
    for name in kernel.arg_names:
        if name in {"normaliser", "delta"}:
            types[name] = "*fp32"
        elif name in {"blocks", "tokens"} or name.endswith(("_head", "_token")):
            types[name] = "i32"
    unaligned = constants.keys() | {"blocks", "tokens"}
    aligned = [index for index, name in enumerate(kernel.arg_names) if name not in unaligned]
    source = ASTSource(
        fn=kernel, signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return int(triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options).metadata.shared)


def main() -> int:
    """Run those that were asked for."""
    parts = {"branch": branch, "interpreter": interpreter, "compiler": compiler}
    chosen = asked(__doc__, {"parts": ([], ", ".join(parts))}).parts or list(parts)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return judged(problem for name in chosen for problem in parts[name]())


if __name__ == "__main__":
    raise SystemExit(main())
