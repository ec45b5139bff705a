"""TRL's SFTTrainer at its defaults and in four configurations, in turns with `tuner train`: the same model and rows.

    python -m tools.gpu_day.peer JOB.json

is the other side, in a process of its own. Rows are one document each, which both attend to alike; weights are drawn.
"""

import importlib.util
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tools.commands import ROOT, environment, run
from tools.gpu_day.models import END, config_of, write_config
from tools.gpu_day.record import Day
from tools.gpu_day.runs import SAID, metrics, trained

WARM_UP = 2
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "liger": {"batches": 1, "attention": "sdpa", "settings": {}},
    "liger, torch_compile": {"batches": 1, "attention": "sdpa", "settings": {"torch_compile": True}},
    "liger, twice the batch": {"batches": 2, "attention": "sdpa", "settings": {}},
    "liger, flash attention 4": {"batches": 1, "attention": "flash_attention_4", "settings": {}},
}
"""All in bf16 without recomputing. Written down before any was run: the best of them is what ours is held against."""


def shape(day: Day) -> tuple[int, int, int]:
    """Tokens of a row, rows of a step, and steps."""
    return (32, 2, 4) if day.small else (4096, 16, 7)


def write_rows(day: Day) -> Path:
    """Rows of one document of random ids each, of which the last one ends it."""
    path = day.work / "peer.jsonl"
    length, rows, steps = shape(day)
    draw, highest = random.Random(1), config_of(day, "0.6B").vocab_size - 1
    with path.open("w", encoding="utf-8") as out:
        for _ in range(rows * steps):
            ids = [draw.randint(END + 1, highest) for _ in range(length - 1)]
            out.write(json.dumps({"input_ids": [*ids, END]}) + "\n")
    return path


def write_tokenizer(day: Day) -> Path:
    """A tokenizer of as many words as the models have: rows are ids already, and both sides ask for one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    place, size = day.work / "peer-tokenizer", config_of(day, "0.6B").vocab_size
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}", pad_token="w0").save_pretrained(place)
    return place


def ours(day: Day, size: str, lora: bool, turn: int) -> dict[str, Any]:
    """A run of the command on the rows: everything but the work itself is its default."""
    _, rows, steps = shape(day)
    recipe = day.work / f"peer-{size}.yaml"
    tree = {
        "model": {"name_or_path": str(write_config(day, size)), "init": "random"},
        "tokenizer": {"name_or_path": str(day.work / "peer-tokenizer")},
        "adapter": {"kind": "lora" if lora else "none"},
        "method": {"kind": "sft", "train_on": "all"},
        "data": {
            "train": {"path": str(day.work / "peer.jsonl"), "format": "tokens"}, "max_length": shape(day)[0],
        },
        "train": {"global_batch_size": rows, "duration": f"{steps} steps", "device": day.device},
        "eval": {"every": "never"},
        "checkpoint": {"at_end": False},
    }  # fmt: skip
    recipe.write_text(json.dumps(tree), encoding="utf-8")
    name = f"peer-{size}-{turn}"
    found = trained(day, recipe, name)
    if not found["ok"]:
        return found
    lines = metrics(day.work / f"run-{name}")
    seconds = statistics.median(line["step_s"] for line in lines[WARM_UP:])
    return figures(day, seconds, max(line["mem_gib"] for line in lines), lines[0]["loss"])


def figures(day: Day, seconds: float, peak_gib: float, loss: float) -> dict[str, Any]:
    """The same figures of both sides."""
    length, rows, _ = shape(day)
    return {
        "tokens/s": round(length * rows / seconds), "step s": round(seconds, 3), "peak GiB": round(peak_gib, 2),
        "first loss": round(loss, 2),
    }  # fmt: skip


def theirs(day: Day, size: str, lora: bool, settings: dict[str, Any], attention: str = "sdpa") -> dict[str, Any]:
    """A run of TRL with these settings and this attention."""
    length, rows, steps = shape(day)
    job = {
        "config": str(write_config(day, size)), "rows": str(day.work / "peer.jsonl"), "steps": steps, "lora": lora,
        "tokenizer": str(day.work / "peer-tokenizer"), "output_dir": str(day.work / "peer-out"), "device": day.device,
        "attention": attention, "settings": {"max_length": length, "use_cpu": not day.on_gpu, **settings},
    }  # fmt: skip
    path = day.work / "peer.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    done = run(["-W", "ignore", "-m", "tools.gpu_day.peer", str(path)], ROOT, environment(threads=None))
    print(done.stderr[-4000:], flush=True)
    if done.returncode:
        return {"ok": False, "said": done.stderr.strip()[-SAID:]}
    report = json.loads(done.stdout.strip().splitlines()[-1])
    return figures(day, statistics.median(report["step_s"][WARM_UP:]), report["peak_gib"], report["loss"])


def cost(day: Day) -> None:
    """Both models, in turns: ours, TRL's defaults, TRL's best, ours again."""
    write_rows(day)
    write_tokenizer(day)
    there = importlib.util.find_spec("trl") is not None
    rows = shape(day)[1]
    for size, lora, fewest in (("0.6B", False, 4), ("8B", True, 1)):
        named = f"{size} {'LoRA' if lora else 'in full'}"
        day.figure(f"{named}, tuner", lambda s=size, a=lora: ours(day, s, a, 1))
        if not there:
            day.say(f"{named}, TRL", skipped="trl is not installed")
            continue
        default = min(8, rows)
        same = {"per_device_train_batch_size": default, "gradient_accumulation_steps": rows // default}
        day.figure(f"{named}, TRL's defaults", lambda s=size, a=lora, o=same: theirs(day, s, a, o))
        for name, own in CONFIGURATIONS.items():
            batch = min(fewest * own["batches"], rows)
            settings = {
                "per_device_train_batch_size": batch, "gradient_accumulation_steps": rows // batch, "bf16": True,
                "gradient_checkpointing": False, "use_liger_kernel": day.on_gpu, **own["settings"],
            }  # fmt: skip
            attention = own["attention"] if day.on_gpu else "sdpa"
            day.figure(f"{named}, TRL, {name}", lambda s=size, a=lora, o=settings, k=attention: theirs(day, s, a, o, k))
        day.figure(f"{named}, tuner again", lambda s=size, a=lora: ours(day, s, a, 2))


def main() -> int:
    """Train by TRL and print times, the peak and the first loss."""
    import resource

    import datasets
    import torch
    import trl
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    datasets.disable_progress_bars()
    cuda, ends = job["device"] == "cuda", list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(job["config"])
    with torch.device(job["device"]):
        # A frozen base in bf16, as ours is; what is trained in float32.
        dtype = torch.bfloat16 if job["lora"] else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=job["attention"])
    lines = Path(job["rows"]).read_text(encoding="utf-8").splitlines()
    settings = trl.SFTConfig(
        output_dir=job["output_dir"], dataset_kwargs={"skip_prepare_dataset": True}, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1, max_steps=job["steps"], **job["settings"],
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model=model, args=settings, train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(job["tokenizer"]), peft_config=lora if job["lora"] else None,
        callbacks=[Clock()],
    )
    ends.append(time.perf_counter())
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    took = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    print(json.dumps({"step_s": took, "peak_gib": peak / 2**30, "loss": losses[0]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
