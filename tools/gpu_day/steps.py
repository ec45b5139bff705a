"""Steps that were predicted before they are measured, and where one goes: each kernel's share of it."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tools.gpu_day.models import config_of, write_config
from tools.gpu_day.peer import write_rows, write_tokenizer
from tools.gpu_day.record import Day
from tools.gpu_day.runs import trained
from tools.gpu_day.starts import saved_model
from tuner.profile.devices import MeasuredStep, measured, steps_of

STEPS = 6
TRACED = 4
LARGEST = 12
"""Kernels of a traced step that are named."""


def steps(day: Day) -> None:
    """Each step of the table of predictions, those that were not measured yet first."""
    write_rows(day)
    write_tokenizer(day)
    planned = [step for rates in measured()[:1] for step in steps_of(rates.device)]
    for step in sorted(planned, key=lambda one: one.measured_s is not None):
        day.figure(str(step), lambda s=step: one_step(day, s))


def traces(day: Day) -> None:
    """A traced step of 0.6B in full and of 8B with LoRA, by kernel."""
    write_rows(day)
    write_tokenizer(day)
    planned = [step for rates in measured()[:1] for step in steps_of(rates.device) if step.measured_s is not None]
    for step in (planned[0], planned[-1]):
        day.figure(f"kernels of {step}", lambda s=step: kernels(day, s))


def recipe_of(day: Day, step: MeasuredStep) -> Path:
    """The recipe of a step, all else by default; tiny where the day is."""
    size, length = step.model.removeprefix("Qwen3 "), 32 if day.small else 4096
    rows = min(step.rows, 4) if day.small else step.rows
    model: dict[str, Any] = {"name_or_path": str(write_config(day, size)), "init": "random"}
    if step.trained == "nf4":  # its weights are made of files
        files = saved_model(day, day.work / f"files-{size}", config_of(day, size))
        model = {"name_or_path": str(files), "quantize": "nf4"}
    tree = {
        "model": model, "tokenizer": {"name_or_path": str(day.work / "peer-tokenizer")},
        "adapter": {"kind": "none"} if step.trained == "full" else {"kind": "lora", "r": 16, "alpha": 32},
        "method": {"kind": "sft", "train_on": "all"}, "optimizer": {"lr": 1e-4},
        "data": {"train": {"path": str(day.work / "peer.jsonl"), "format": "tokens"}, "max_length": length},
        "train": {
            "global_batch_size": rows, "micro_batch_size": step.micro_rows, "duration": f"{STEPS} steps",
            "gradient_checkpointing": "none", "precision": step.precision if day.on_gpu else "auto",
            "device": day.device,
        },
        "eval": {"every": "never"}, "checkpoint": {"at_end": False},
    }  # fmt: skip
    path = day.work / f"step-{re.sub('[^a-z0-9]+', '-', str(step).lower())}.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def one_step(day: Day, step: MeasuredStep) -> dict[str, Any]:
    """Seconds and memory of a step, and what was predicted for it."""
    recipe = recipe_of(day, step)
    found = trained(day, recipe, recipe.stem)
    if not found["ok"]:
        return found
    said = {"measured s": found["step s"], "measured GiB": found["peak GiB"], "tokens/s": found["tokens/s"]}
    told = {"predicted s": step.predicted_s, "predicted GiB": step.predicted_gib}
    off = {} if day.small else {"time off": f"{step.predicted_s / found['step s'] - 1:+.1%}"}
    return {**said, **told, **off, "first step s": found["first step s"], "command s": found["whole command s"]}


def kernels(day: Day, step: MeasuredStep) -> dict[str, Any]:
    """Milliseconds on the device of a traced step: the largest kernels, all together, and while nothing ran."""
    recipe = recipe_of(day, step)
    name = f"trace-{recipe.stem}"
    found = trained(day, recipe, name, "--profile.steps", f"[{TRACED}]")
    if not found["ok"]:
        return found
    times, calls, spans = Counter[str](), Counter[str](), []
    for path in (day.work / f"run-{name}").rglob("*trace*.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
                kind = re.sub(r"<.*|\(.*", "", event["name"])[:60]
                times[kind] += event["dur"] / 1e3
                calls[kind] += 1
                spans.append((event["ts"], event["ts"] + event["dur"]))
    largest = {f"{kind} ({calls[kind]})": round(took, 1) for kind, took in times.most_common(LARGEST)}
    busy, end = 0.0, 0.0
    for begun, ended in sorted(spans):
        busy += max(0.0, ended - max(begun, end)) / 1e3
        end = max(end, ended)
    took = {"ms of kernels": round(sum(times.values()), 1), "ms busy": round(busy, 1), "kernels": sum(calls.values())}
    return {**took, **largest}
