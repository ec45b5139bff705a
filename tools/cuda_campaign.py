"""Predict every causal type that transformers knows for a GPU: a number, or refused with a reason; never a traceback.

    python -m tools.cuda_campaign [--only llama qwen3] [--out figures.json] [--table figures.md]

Each type is a tiny random config (tools/causal_cases.py). Its step is traced as a GPU would take it, in full, with an
adapter, and with layers computed again: the kernels that CUDA chooses, on tensors without memory. What the kernels of
variable-length attention demand and fakes do not check (FlashAttention 2: one width for query, key and value, a
multiple of 8 and at most 256; dense rows; bounds int32) is checked here. Exits with 1 where a type crashed.
"""

import contextlib
import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tools.causal_cases import DECODERS, TYPES, quiet, tiny_config
from tools.commands import asked, workplace
from tuner.config.load import load_recipe
from tuner.errors import TunerError
from tuner.profile import tracing
from tuner.profile.devices import find_device
from tuner.profile.predict import Target, predict
from tuner.runtime.dist import RankInfo
from tuner.runtime.torch_private import TorchDispatchMode
from tuner.train.step import optimizer_step

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "r": 4, "alpha": 8}, "train": {"gradient_checkpointing": "selective"}},
    "again": {"train": {"gradient_checkpointing": "full"}, "data": {"packing": False}},
}
WIDEST = 256
_FLASH = "tuner::flash_attention"


@dataclass
class Outcome:
    """Of one type in one mode: predicted, with the bytes of its tensors, refused, or crashed."""

    verdict: str
    reason: str = ""
    tensor_bytes: int | None = None


@dataclass
class Finding:
    """Of one type: why transformers itself cannot make one, or what became of each mode."""

    type: str
    impossible: str = ""
    modes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0


class KernelRefused(Exception):
    """The kernel of an operation would not take what it is given."""


class Demands(TorchDispatchMode):  # type: ignore[misc]  # its type is not known
    """Holds every call of flash attention to what its kernel demands on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.name() == _FLASH:
            check_flash(*args[:4])
        return func(*args, **(kwargs or {}))


def check_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor) -> None:
    """Raise KernelRefused for heads ``[heads, T, width]`` and bounds of documents that FlashAttention 2 refuses.

    Widths that differ, or are no multiple of 8, are padded on the way to it.
    """
    width = max(tensor.shape[-1] for tensor in (query, key, value))
    if width > WIDEST:
        raise KernelRefused(f"heads of {width} columns: more than {WIDEST}")
    if query.shape[0] % key.shape[0] or key.shape[:2] != value.shape[:2]:
        raise KernelRefused(f"{query.shape[0]} query heads on {key.shape[0]} key and {value.shape[0]} value heads")
    if {tensor.dtype for tensor in (query, key, value)} not in ({torch.bfloat16}, {torch.float16}):
        raise KernelRefused(f"types {query.dtype}, {key.dtype}, {value.dtype}")
    if bounds.dtype != torch.int32 or not bounds.is_contiguous():
        raise KernelRefused(f"bounds of {bounds.dtype}")


@contextlib.contextmanager
def demanding() -> Iterator[None]:
    """Within, the steps that are traced are held to the kernels' demands."""
    def step(*given: Any) -> Any:
        with Demands():
            return optimizer_step(*given)

    with patch.object(tracing, "optimizer_step", step):
        yield


def predicted(directory: Path, mode: str, device: str) -> Outcome:
    """One mode of the config in a directory, on one device of this name."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": str(directory), "init": "random"}, "tokenizer": {"name_or_path": "byte"},
        "data": {"train": str(directory / "rows.jsonl"), "max_length": 64},
        "train": {"device": "cuda", "precision": "bf16", "global_batch_size": 2},
    }
    for section, values in MODES[mode].items():
        tree.setdefault(section, {}).update(values)
    card = find_device(device)
    try:
        with demanding():
            found = predict(load_recipe(tree).recipe, Target(card, RankInfo(), card.memory_bytes))
    except TunerError as error:
        if not error.message.strip():
            return Outcome("crashed", f"{type(error).__name__} without a reason")
        return Outcome("refused", error.message)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Outcome("crashed", f"{what} ({Path(where.filename).name}:{where.lineno})")
    return Outcome("predicted", "", found.tensor_bytes)


def examine(model_type: str, device: str, decoder: bool = False, modes: Sequence[str] = tuple(MODES)) -> Finding:
    """One type in these modes; with ``decoder`` an encoder as the decoder that its config can make of it."""
    finding, started = Finding(f"{model_type}, is_decoder" if decoder else model_type), time.perf_counter()
    with workplace() as directory, quiet():
        try:
            config = tiny_config(model_type)
            if decoder:
                config.is_decoder = True
            config.save_pretrained(directory)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
            finding.impossible = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            finding.modes = {mode: predicted(directory, mode, device) for mode in modes}
    finding.seconds = round(time.perf_counter() - started, 2)
    return finding


def table(findings: Sequence[Finding]) -> str:
    """A line of Markdown for each type."""
    lines = [f"| type | {' | '.join(MODES)} |", "|" + " --- |" * (1 + len(MODES))]
    for finding in findings:
        cells = [_cell(finding.modes[mode]) if mode in finding.modes else finding.impossible for mode in MODES]
        lines.append(f"| {finding.type} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(outcome: Outcome) -> str:
    if outcome.tensor_bytes is not None:
        return f"{outcome.tensor_bytes:,} bytes"
    return f"{outcome.verdict}: {outcome.reason}"


def main() -> int:
    """Run the campaign; exit code 1 where a type crashed."""
    options = asked(
        __doc__, only=([], "these types alone"), device=("h100-80g", "a name of `tuner profile --device`"),
        out=(Path, "where the figures go, as JSON"), table=(Path, "where the figures go, as a table of Markdown"),
    )
    torch.set_num_threads(1)
    chosen = [(each, False) for each in options.only or TYPES]
    chosen += [(each, True) for each in DECODERS if each in (options.only or TYPES)]
    findings = []
    for model_type, decoder in chosen:
        findings.append(examine(model_type, options.device, decoder))
        print(json.dumps(asdict(findings[-1])), flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    if options.table:
        options.table.write_text(table(findings))
    verdicts = Counter(outcome.verdict for finding in findings for outcome in finding.modes.values())
    print(json.dumps({"types": len(findings), "impossible": sum(bool(one.impossible) for one in findings), **verdicts}))
    return 1 if verdicts["crashed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
