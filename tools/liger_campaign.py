"""Compile every kernel of liger that a training launches, for every generation of GPUs, without a GPU.

    python -m tools.liger_campaign [--only llama gemma2] [--targets 80 90]

For each type that liger has kernels for, the step of a tiny model is traced as for CUDA (tools/cuda_campaign.py), and
each launch of a Triton kernel noted: its types, its constants, and the sizes that liger chose. Each is then compiled
ahead of time to machine code, by the compiler that Triton brings, for compute capabilities 8.0 to 12.0. Exits with 1
where one does not compile.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from tools.causal_cases import TYPES, quiet, tiny_config
from tools.commands import asked, workplace
from tools.cuda_campaign import predicted

TARGETS = (80, 89, 90, 100, 120)
VOCABULARY = 151936
_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
_OPTIONS = {"num_warps", "num_stages", "num_ctas"}
_LARGEST = 1 << 31


@dataclass(frozen=True)
class Launch:
    """One way in which a kernel is launched: the types of its arguments, those that are constants, and its options."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """The kernel's own."""
        return str(self.kernel.fn.__name__)


def launch_of(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Launch:
    """What a call of a kernel's ``run`` would compile."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    types, constants = [], []
    for parameter in kernel.params:
        value = given.get(parameter.name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr or value is None:
            types.append((parameter.name, "constexpr"))
            constants.append((parameter.name, value))
        else:
            types.append((parameter.name, type_of(value)))
    options = tuple(sorted((k, v) for k, v in kwargs.items() if k in _OPTIONS and v is not None))
    return Launch(kernel, tuple(types), tuple(constants), options)


def type_of(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -_LARGEST <= value < _LARGEST else "i64"
    return "fp32"


@contextlib.contextmanager
def noting(found: dict[Launch, None]) -> Iterator[None]:
    """Within, launches are noted, each once, and none happens. Of kernels with several settings it is the first."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        found.setdefault(launch_of(kernel, args, kwargs))

    def run_first(tuned: Any, *args: Any, **kwargs: Any) -> None:
        tuned.fn.run(*args, **kwargs, **tuned.configs[0].all_kwargs())

    with patch.object(JITFunction, "run", run), patch.object(Autotuner, "run", run_first):
        yield


def launches(model_type: str) -> dict[Launch, None]:
    """The launches in a traced step of a tiny model of the type, in full; empty where it cannot be traced."""
    found: dict[Launch, None] = {}
    with workplace() as name, quiet():
        try:
            config = tiny_config(model_type)
            config.get_text_config().vocab_size = VOCABULARY
            config.save_pretrained(name)
        except Exception:  # noqa: BLE001 - transformers itself cannot make one
            return found
        with patch("tuner.profile.tracing._no_kernels", lambda: noting(found)):
            predicted(name, "full", "h100-80g")
    return found


def problem(launch: Launch, capability: int) -> str | None:
    """Why a launch does not compile for a capability (90 is 9.0); None where it does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    constants = {(names.index(name),): value for name, value in launch.constants}
    source = ASTSource(fn=launch.kernel, signature=dict(launch.types), constexprs=constants)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is a finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None if made.asm.get("cubin") else "no machine code came out"


def main() -> int:
    """Run the campaign; exit code 1 where a kernel does not compile."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    options = asked(__doc__, only=[t for t in TYPES if t in MODEL_TYPE_TO_APPLY_LIGER_FN], targets=list(TARGETS))
    found: dict[Launch, str] = {}
    for model_type in options.only:
        fresh = [launch for launch in launches(model_type) if launch not in found]
        found |= dict.fromkeys(fresh, model_type)
        print(json.dumps({"type": model_type, "new": [launch.name for launch in fresh]}), flush=True)
    bad = 0
    for launch, model_type in found.items():
        problems = {target: why for target in options.targets if (why := problem(launch, target)) is not None}
        bad += bool(problems)
        print(json.dumps({"kernel": launch.name, "type": model_type, "problems": problems}), flush=True)
    print(json.dumps({"kernels": len({launch.name for launch in found}), "launches": len(found), "bad": bad}))
    return 1 if bad or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
