"""What is before the first step: an 8B LoRA from files, twice, and methods with a reference, held against the CPU."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu_day.models import SMALL, config_of, write_documents
from tools.gpu_day.record import Day
from tools.gpu_day.runs import failed, metrics, tuner

BARE = "import torch, transformers, peft; from transformers import AutoModelForCausalLM, AutoTokenizer"
METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"method": {"kind": "dpo"}}, "dpo, lora": {"method": {"kind": "dpo"}, "adapter": {"kind": "lora"}},
    "kto, lora": {"method": {"kind": "kto"}, "adapter": {"kind": "lora"}},
    "dpo, dora": {"method": {"kind": "dpo"}, "adapter": {"kind": "dora"}},
}
EXACT = 3e-3
"""How far a loss in fp32 may be from the CPU's, of itself."""


def starts(day: Day) -> None:
    """Seconds by phase, and whether every method begins and computes what the CPU does."""
    for turn in ("first", "second"):
        day.figure(f"bare imports, {turn} time", _imports)
    files = saved_model(day, day.work / "files-8B", config_of(day, "8B"))
    recipe = {
        "adapter": {"kind": "lora"}, "method": {"kind": "pretrain"}, "tokenizer": {"name_or_path": "byte"},
        "data": {"train": str(write_documents(day)), "max_length": 64 if day.small else 4096},
    }  # fmt: skip
    shutil.rmtree(day.work / "cache-starts", ignore_errors=True)
    for turn in ("first", "second"):
        day.check(f"8B LoRA from files, {turn} launch", lambda: _launched(day, "8B", files, recipe)[0])
    tiny = saved_model(day, day.work / "files-tiny", type(config_of(day, "8B"))(**SMALL))
    rows = _pairs(day)
    for name, sections in METHODS.items():
        asked = {**sections, "data": {"train": str(rows[sections["method"]["kind"]]), "max_length": 256}}
        day.check(f"{name}, against the CPU", lambda asked=asked: _against_cpu(day, tiny, asked))


def _imports() -> dict[str, Any]:
    began = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", "-c", BARE], check=True, capture_output=True)
    return {"s": round(time.monotonic() - began, 2)}


def saved_model(day: Day, place: Path, config: Any) -> Path:
    """A model with drawn weights in bf16, as files; they are in the page cache then."""
    import torch
    from transformers import AutoModelForCausalLM

    if not place.is_dir():
        torch.manual_seed(0)
        with torch.device(day.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(place)
    return place


def _pairs(day: Day) -> dict[str, Path]:
    """Pairs and labelled answers of random numbers."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(str(draw.randrange(10**4)) for _ in range(draw.randrange(3, 20)))

    rows: dict[str, list[dict[str, Any]]] = {
        "dpo": [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(64)],
        "kto": [{"prompt": text(), "completion": text(), "label": bool(i % 2)} for i in range(64)],
    }
    paths = {kind: day.work / f"{kind}.jsonl" for kind in rows}
    for kind, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[kind]), encoding="utf-8")
    return paths


def _launched(
    day: Day, name: str, model: Path, sections: dict[str, Any], **train: str
) -> tuple[dict[str, Any], list[float]]:
    """A launch of four steps: its start by phase, and its losses."""
    run, recipe = day.work / f"run-starts-{name}", day.work / f"starts-{name}.yaml"
    shutil.rmtree(run, ignore_errors=True)
    tree = {
        "model": {"name_or_path": str(model)}, "tokenizer": {"name_or_path": "byte"}, **sections, "name": run.name,
        "train": {"duration": "4 steps", "global_batch_size": 4, "device": day.device, **train},
        "eval": {"every": "never"}, "checkpoint": {"at_end": False}, "output_dir": str(run),
    }  # fmt: skip
    tree["data"] = {**sections["data"], "cache_dir": str(day.work / "cache-starts")}
    recipe.write_text(json.dumps(tree), encoding="utf-8")
    done = tuner("train", str(recipe))
    if done.returncode:
        return failed(done), []
    seconds = json.loads((run / "run.json").read_text(encoding="utf-8"))["launches"][-1]["start_s"]
    return {"start s": round(sum(seconds.values()), 1), **seconds}, [line["loss"] for line in metrics(run)]


def _against_cpu(day: Day, model: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """The largest relative difference of a loss from the CPU's in fp32: in fp32, and as `auto` computes."""
    asked = {"auto": {}, "fp32": {"precision": "fp32"}, "cpu": {"precision": "fp32", "device": "cpu"}}
    found = {name: _launched(day, name, model, sections, **train) for name, train in asked.items()}
    if any(not losses for _, losses in found.values()):
        return next(said for said, losses in found.values() if not losses)
    wanted = found["cpu"][1]
    off = {
        name: max(abs(one - other) / abs(other) for one, other in zip(found[name][1], wanted, strict=True))
        for name in ("fp32", "auto")
    }
    return {"ok": off["fp32"] <= EXACT, "start s": found["auto"][0]["start s"], **off}
