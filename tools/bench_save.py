"""What a save costs: against DCP's own writer, and the training thread while one is written beside it.

    python -m tools.bench_save MODEL_DIRECTORY WORK_DIRECTORY --rounds 5 [--steps 10] [--only plain|training]

MODEL_DIRECTORY is a Hugging Face model, such as the one of `python -m tools.build_smollm2`. WORK_DIRECTORY must be on
the disk that is meant.

plain     its weights and AdamW's moments in float32, saved in turns by ours at once (hashed, with manifest and
          renames), by `FileSystemWriter(thread_count=1, sync_files=True)`, and as one flushed file of the same bytes;
          each into a fresh directory, with everything flushed to the disk before the clock starts
training  launches of `tuner train` on the model that never save, save once at once, and save once beside the steps, in
          turns: how long the training thread stands still, and how much later the last step ends

Prints medians of the rounds as JSON; overheads are for a save every 500 steps of the measured length.
"""

import gc
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.commands import asked, one_of, write_lines
from tools.measures import alternated

EVERY = 500
RECIPE = {
    "train": {"device": "cpu", "precision": "fp32", "global_batch_size": 1, "micro_batch_size": 1},
    "logging": {"level": "error"},
}


def state_of(model_dir: Path) -> dict[str, Any]:
    """The model's weights, and two moments of each that no compression could shrink."""
    import torch
    from safetensors.torch import load_file

    weights = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        weights |= {f"model/{name}": tensor.float() for name, tensor in load_file(path).items()}
    moments = {
        f"optimizer/{moment}/{name}": torch.randn_like(tensor)
        for moment in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    return weights | moments


def save_ours(place: Path, state: dict[str, Any]) -> None:
    """A committed checkpoint."""
    from tuner.checkpoint.save import CheckpointDir, save

    save(CheckpointDir(place, "bench"), 1, state, {}, {})


def save_dcp(place: Path, state: dict[str, Any]) -> None:
    """DCP's own format, flushed."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(place, thread_count=1, sync_files=True))


def save_raw(place: Path, state: dict[str, Any]) -> None:
    """The bytes alone, in one flushed file."""
    place.mkdir()
    with (place / "raw").open("wb", buffering=0) as file:
        for tensor in state.values():
            file.write(tensor.reshape(-1).numpy().data)
        os.fsync(file.fileno())


def plain(model_dir: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each way to save, in turns."""
    state = state_of(model_dir)
    ways: dict[str, Callable[[Path, dict[str, Any]], None]] = {"ours": save_ours, "dcp": save_dcp, "raw": save_raw}

    def took(name: str) -> float:
        os.sync()
        started = time.perf_counter()
        ways[name](work / name, state)
        seconds = time.perf_counter() - started
        shutil.rmtree(work / name)
        return seconds

    taken = alternated({name: partial(took, name) for name in ways}, rounds + 1)
    seconds = {name: values[1:] for name, values in taken.items()}  # the first round warms up
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "gigabytes": round(sum(t.numel() * t.element_size() for t in state.values()) / 1e9, 3),
        **{f"{name}_s": round(median, 3) for name, median in medians.items()},
        "ours_to_dcp": round(medians["ours"] / medians["dcp"], 3),
        "rounds_s": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }


def launch(model_dir: Path, work: Path, name: str, steps: int, checkpoint: dict[str, Any]) -> dict[str, float]:
    """One run of so many steps: the seconds between its first step and its last, and those its saves took of them."""
    from tuner.config.load import load_recipe
    from tuner.run.main import train
    from tuner.run.options import LaunchOptions
    from tuner.run.tasks.save import SaveTask
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo
    from tuner.train import loop
    from tuner.train.step import optimizer_step

    tree = {
        **RECIPE, "model": {"name_or_path": str(model_dir)}, "output_dir": str(work / name),
        "data": {"train": str(work / "rows.jsonl"), "max_length": 256, "cache_dir": str(work / "cache")},
        "checkpoint": {"at_end": False, **checkpoint},
    }
    tree["train"] = {**tree["train"], "duration": f"{steps} steps"}  # type: ignore[dict-item]
    os.sync()
    began: list[float] = []
    stood, ended = [0.0], [0.0]
    real_save, real_join = SaveTask._save, SaveTask._join

    def step(*args: Any) -> Any:
        began.append(time.perf_counter())
        return optimizer_step(*args)

    def save(task: SaveTask, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        yield from real_save(task, *args, **options)
        stood[0] += time.perf_counter() - started

    def join(task: SaveTask) -> Any:
        if task._progress.step == steps and not ended[0]:
            ended[0] = time.perf_counter()
        return real_join(task)

    noting = patch.multiple(SaveTask, _save=save, _join=join)
    with patch.object(loop, "optimizer_step", step), noting:
        train(load_recipe(tree), LaunchOptions(), RankInfo(), Console(main=False))
    shutil.rmtree(work / name)
    gc.collect()  # a model's modules refer to each other: 1.6 GB a launch would wait for the collector
    # The first step pays for memory that later ones find again.
    return {"steps_s": ended[0] - began[1], "stood_s": stood[0], "step_s": statistics.median(_differences(began))}


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def training(model_dir: Path, work: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Launches that differ in how they save, in turns."""
    words = " ".join(f"word{number}" for number in range(60))
    write_lines(work / "rows.jsonl", ({"prompt": f"{i}", "completion": words} for i in range(steps)))
    once = f"{steps // 2 + 1} steps"
    ways: dict[str, dict[str, Any]] = {
        "never": {"every": "never"},
        "at_once": {"every": once, "async_save": False},
        "beside": {"every": once, "async_save": True},
    }
    found = alternated({name: partial(launch, model_dir, work, name, steps, way) for name, way in ways.items()}, rounds)
    middle = {name: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for name, runs in found.items()}
    step_s = middle["never"]["step_s"]
    later = {name: middle[name]["steps_s"] - middle["never"]["steps_s"] for name in ("at_once", "beside")}
    return {
        "steps": steps, "step_s": round(step_s, 3),
        "stall_s": {name: round(middle[name]["stood_s"], 3) for name in later},
        "later_s": {name: round(seconds, 3) for name, seconds in later.items()},
        f"overhead_every_{EVERY}": {name: round(seconds / (EVERY * step_s), 6) for name, seconds in later.items()},
        "rounds": found,
    }


def main() -> None:
    """Measure and print."""
    options = asked(__doc__, {"model": Path, "work": Path}, rounds=5, steps=10, only=one_of(("plain", "training")))
    options.work.mkdir(parents=True, exist_ok=True)
    if options.only != "training":
        print(json.dumps({"plain": plain(options.model, options.work, options.rounds)}), flush=True)
    if options.only != "plain":
        found = training(options.model, options.work, options.rounds, options.steps)
        print(json.dumps({"training": found}), flush=True)


if __name__ == "__main__":
    main()
