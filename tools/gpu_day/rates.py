"""Rates of the pieces of a step: products by shape, attention by kernel and length, loss, a copy.

Predictions read them in `tuner/profile/measured.json`; ``python -m tools.gpu_day record`` puts them there.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tools.gpu_day.arithmetic import kernels_of
from tools.gpu_day.record import Day
from tuner.model.documents import Documents
from tuner.model.fastest import USUAL_FLASH, Heads, Version, one_pass, random_inputs, used, versions_for
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import OutputLayer
from tuner.profile import devices as table
from tuner.runtime.device import generation

TOKENS = 8192
PRODUCTS = (
    (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936), (4096, 1024), (4096, 4096), (4096, 12288),
    (12288, 4096), (4096, 151936),
)  # fmt: skip
"""Inputs and outputs of Qwen3's layers, 0.6B and 8B."""
THIN = ((1024, 16), (4096, 16), (16, 4096))
QWEN, LLAMA = Heads(16, 8, 128, 128, 0.0, 0.0), Heads(32, 8, 128, 128, 0.0, 0.0)
ATTENTION: dict[str, tuple[Heads, int, int]] = {
    "0.6B, documents of 4,096": (QWEN, 4096, 0), "0.6B, documents of 512": (QWEN, 512, 0),
    "8B, documents of 4,096": (LLAMA, 4096, 0), "8B, documents of 16,384": (LLAMA, 16384, 0),
    "in a window of 512": (QWEN, 4096, 512), "64 channels": (Heads(32, 8, 64, 64, 0.0, 0.0), 4096, 0),
    "256 channels, soft cap (Gemma 2)": (Heads(8, 4, 256, 256, 50.0, 0.0), 4096, 0),
    "sinks in a window (gpt-oss)": (Heads(64, 8, 64, 64, 0.0, 0.0, has_sinks=True), 4096, 128),
    "192 and 128 channels (DeepSeek)": (Heads(16, 16, 192, 128, 0.0, 0.0), 4096, 0),
}  # fmt: skip
"""Heads, tokens of a document, tokens that are seen (0: all)."""
OF_RECORD = ("0.6B, documents of 512", "0.6B, documents of 4,096")


def rates(day: Day) -> None:
    """All of them."""
    for inputs, outputs in (*PRODUCTS, *THIN):
        day.figure(f"product {inputs:,} x {outputs:,}", lambda i=inputs, o=outputs: product(day, i, o))
    day.figure("copy", lambda: copy(day))
    for name, (heads, length, window) in ATTENTION.items():
        day.figure(f"attention, {name}", lambda h=heads, n=length, w=window: attention(day, h, n, w))
    for kernel in kernels_of(day):
        day.figure(f"loss, {kernel}", lambda k=kernel: loss(day, k))


def product(day: Day, inputs: int, outputs: int) -> dict[str, Any]:
    """Operations a second of one product, and bytes."""
    tokens, inputs, outputs = (16, 8, 8) if day.small else (TOKENS, inputs, outputs)
    a = torch.randn(tokens, inputs, device=day.device, dtype=torch.bfloat16)
    b = torch.randn(inputs, outputs, device=day.device, dtype=torch.bfloat16)
    took = day.seconds(lambda: a @ b, 12, 4)
    moved = 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
    return {"op/s": 2 * tokens * inputs * outputs / took, "bytes/s": moved / took}


def copy(day: Day) -> dict[str, Any]:
    """Bytes a second that are read and written."""
    source = torch.empty(1 << (10 if day.small else 30), device=day.device, dtype=torch.bfloat16)
    there = torch.empty_like(source)
    return {"bytes/s": 2 * source.nbytes / day.seconds(lambda: there.copy_(source), 12, 4)}


def attention(day: Day, heads: Heads, length: int, window: int) -> dict[str, Any]:
    """Operations a second of a forward and a backward pass, by each flash attention that is there."""
    length, window = (16, min(window, 8)) if day.small else (length, window)
    device, count = torch.device(day.device), 1 if day.small else max(1, TOKENS // length)
    lengths = (length,) * count
    documents, found = Documents.of(lengths, device), dict[str, Any]()
    seen = sum(min(place + 1, window or length) for place in range(length)) * count
    operations = 2 * heads.queries * seen * (heads.width + heads.value_width) * 3.5  # 2 products forward, 5 backward
    versions: list[Version | None] = [None]
    if day.on_gpu:
        versions += versions_for([heads], generation(device.index))
    for version in versions:
        leaves, name = random_inputs(heads, lengths, device), USUAL_FLASH if version is None else version.name
        try:
            with used(version):
                took = day.seconds(lambda k=leaves: one_pass(heads, k, documents, window), 12, 4)
        except Exception as error:  # noqa: BLE001 - of a package that is not ours
            found[name] = str(error)[:200]
            continue
        found[name] = operations / took
    return found


def loss(day: Day, kernel: str) -> dict[str, Any]:
    """Seconds of output layer and loss, forward and backward, of 0.6B's vocabulary."""
    tokens, width, vocabulary = (16, 8, 50) if day.small else (TOKENS, 1024, 151936)
    hidden = torch.randn(tokens, width, device=day.device, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=day.device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=day.device)

    def work() -> None:
        with day.autocast():
            OutputLayer(weight, None, kernel=KERNELS[kernel]).cross_entropy(hidden, targets).backward()

    return {"ms": round(day.seconds(work, 6) * 1e3, 2)}


def record(lines: list[dict[str, Any]], path: Path) -> str:
    """Put what a day measured into the table of predictions; says what. Raises ValueError without rates."""
    machine = next(line for line in lines if line["what"] == "machine")
    found = {line["what"]: line for line in lines if line["part"] == "rates" and "op/s" in line or "bytes/s" in line}
    products = [[*sides, found[_named(*sides)]["op/s"]] for sides in PRODUCTS if _named(*sides) in found]
    attended = [
        [ATTENTION[name][1], line[USUAL_FLASH]]
        for name in OF_RECORD
        for line in lines
        if line["what"] == f"attention, {name}" and isinstance(line.get(USUAL_FLASH), float)
    ]
    if not products or not attended or "copy" not in found:
        raise ValueError("there are no rates: run it with --only machine rates steps")
    of_device = {
        "device": machine["device"], "date": machine["date"],
        "versions": {name: machine[name] for name in ("torch", "cuda", "transformers")},
        "rates": {
            "tokens": TOKENS, "products": products, "attention": attended, "copy": found["copy"]["bytes/s"],
            "thin": found[_named(*THIN[1])]["bytes/s"],
        },
        "steps": _steps(machine["device"], lines),
    }  # fmt: skip
    others = [one for one in json.loads(path.read_text(encoding="utf-8")) if one["device"] != of_device["device"]]
    path.write_text(json.dumps([*others, of_device], indent=1) + "\n", encoding="utf-8")
    done = sum(step["measured_s"] is not None for step in of_device["steps"])
    return f"{machine['device']}: {len(products)} products, {done} of {len(of_device['steps'])} steps measured"


def _named(inputs: int, outputs: int) -> str:
    return f"product {inputs:,} x {outputs:,}"


def _steps(device: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the table with what was measured; what was predicted for them stays as it was written down."""
    measured = {line["what"]: line for line in lines if line["part"] == "steps" and "measured s" in line}
    found = []
    for step in table.steps_of(device):
        line = measured.get(str(step), {})
        measured_s, size = line.get("measured s", step.measured_s), line.get("measured GiB", step.measured_gib)
        found.append({**vars(step), "measured_s": measured_s, "measured_gib": size})
    return found
