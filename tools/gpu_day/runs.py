"""The real commands: a user's first run, saves beside it, the proof of resuming, and predicted against measured."""

import json
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.commands import ROOT, environment, read_lines, run
from tools.gpu_day.models import write_recipe
from tools.gpu_day.record import Day

CAPPED = """
import sys, torch
if torch.cuda.is_available():
    size = {gib} * 2**30
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.mem_get_info = lambda device=None: (size, size)
from tuner.cli.main import main
sys.argv = ["tuner", *sys.argv[1:]]
main()
"""
"""The command on a card that has this much memory, as far as torch's allocator goes, and says so."""
SAID = 600
"""Characters of an error that are brought home."""


def tuner(*words: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command line; what it says goes to the part's log too."""
    start = ["-m", "tuner"] if program is None else ["-c", program]
    done = run([*start, *words], ROOT, environment(threads=None))
    print("$ tuner", *words, f"\n{done.stderr}\nexit code {done.returncode}", flush=True)
    return done


def failed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a command that should have ended well said."""
    return {"ok": False, "exit code": done.returncode, "said": done.stderr.strip()[-SAID:]}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's steps."""
    return read_lines(directory / "metrics.jsonl", "train")


def rates(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the second half of a run's steps, its first step, and its largest memory."""
    later = steps[len(steps) // 2 :]
    found = {
        "tokens/s": round(statistics.median(line["tok_per_s"] for line in later)),
        "step s": round(statistics.median(line["step_s"] for line in later), 3),
        "first step s": round(steps[0]["step_s"], 1), "peak GiB": max(line["mem_gib"] for line in steps),
    }
    shares = [line["mfu"] for line in later if line.get("mfu") is not None]
    return found | ({"MFU": f"{statistics.median(shares):.1%}"} if shares else {})


def trained(
    day: Day, recipe: Path, name: str, *flags: str, program: str | None = None, keep: bool = False
) -> dict[str, Any]:
    """Train into a fresh directory, whose checkpoints stay where asked; its rates, or what the command said."""
    run = day.work / f"run-{name}"
    shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    words = ("train", str(recipe), "--name", name, "--output_dir", str(run), *flags)
    done = tuner(*words, program=program)
    if done.returncode not in (0, 75):
        return failed(done)
    took = round(time.monotonic() - began, 1)
    if not keep:  # gigabytes, of several runs
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return {"ok": True, **rates(metrics(run)), "whole command s": took}


def first(day: Day) -> None:
    """What somebody gets who names a model and rows, and then a LoRA on a model of 8B."""
    recipe = write_recipe(day, "0.6B")
    day.check("first run, 0.6B in full, defaults", lambda: trained(day, recipe, "first"))
    lora = write_recipe(day, "8B", "lora")
    steps = ("--train.duration", "3 steps" if day.small else "8 steps")
    day.check("first run, 8B LoRA, defaults", lambda: trained(day, lora, "lora", *steps))


def resume(day: Day) -> None:
    """Saves beside the steps; a resumed run has the bits of the unbroken one; what deterministic kernels cost."""
    recipe = write_recipe(day, "0.6B")
    steps, every = ("4 steps", "2 steps") if day.small else ("12 steps", "4 steps")
    saving = ("--train.duration", steps, "--checkpoint.every", every)
    day.check(f"0.6B with a save every {every}", lambda: trained(day, recipe, "saves", *saving, keep=True))

    def proven() -> dict[str, Any]:
        done = tuner("verify-resume", str(day.work / "run-saves"), "--steps", "1" if day.small else "2")
        return {"exit code": 0} if done.returncode == 0 else failed(done)

    day.check("verify-resume, bit for bit", proven)
    shutil.rmtree(day.work / "run-saves", ignore_errors=True)
    flags = ("--train.duration", "3 steps" if day.small else "6 steps", "--train.deterministic", "true")
    day.check("0.6B with deterministic kernels", lambda: trained(day, recipe, "deterministic", *flags))


def profiled(day: Day, recipe: Path, name: str, *flags: str) -> dict[str, Any]:
    """Predicted and measured peak and step of one setting."""
    place = day.work / f"profile-{name}"
    shutil.rmtree(place, ignore_errors=True)
    steps = "1" if day.small else "5"
    done = tuner("profile", str(recipe), "--measure", steps, "--output", str(place), "--json", *flags)
    if not (place / "report.json").is_file():
        return failed(done)
    report = json.loads((place / "report.json").read_text(encoding="utf-8"))
    measured, predicted = report["measured"], report["predicted"]
    peak, reserved = measured["memory"]["peak_bytes"], measured["memory"]["reserved_bytes"]
    found = {
        "exit code": done.returncode, "measured GiB": gib(peak), "measured step s": round(measured["step_s"], 3),
        "tokens/s": round(measured["tok_per_s"]),
    }
    if reserved is not None:
        found["reserved GiB"] = gib(reserved)
    if predicted is not None:
        # Both of what an allocator counts: what a process takes besides (its context) is in no figure of torch's.
        found["predicted GiB"] = gib(predicted["counted_bytes"])
        found["predicted by measured"] = round(predicted["counted_bytes"] / peak, 3)
        found["predicted step s"] = round(predicted["time"]["step_s"], 3)
        found["predicted of the process GiB"] = gib(predicted["peak_bytes"])
    return found


def gib(size: float) -> float:
    """Bytes in GiB, of two digits."""
    return round(size / 2**30, 2)


def predicted(day: Day) -> None:
    """Peak and step of both models, as predicted and as they are."""
    full, lora = write_recipe(day, "0.6B"), write_recipe(day, "8B", "lora")
    for rows in ("1",) if day.small else ("1", "4"):
        flags = ("--train.micro_batch_size", rows)
        day.figure(f"0.6B in full, {rows} rows", lambda f=flags, r=rows: profiled(day, full, f"full-{r}", *f))
    for level in ("full",) if day.small else ("none", "full"):
        flags = ("--train.gradient_checkpointing", level)
        day.figure(f"8B LoRA, recomputing {level}", lambda f=flags, v=level: profiled(day, lora, f"lora-{v}", *f))


def small_card(day: Day) -> None:
    """8B LoRA where the allocator gives out 23 GiB: by defaults it should train; if not, what is a user told?"""
    recipe = write_recipe(day, "8B", "lora")
    length = "32" if day.small else "2048"
    flags = ("--data.max_length", length, "--train.stop_after", "2 steps" if day.small else "3 steps")
    program = CAPPED.format(gib=23)
    day.check("first run, 8B LoRA on 23 GiB", lambda: trained(day, recipe, "small-card", *flags, program=program))
