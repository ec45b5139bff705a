"""The optimizer's states on the host against states on the device: bits of runs, meshes that they cross, bytes.

    python -m tools.host_campaign --model .demo/smollm2 --steps 20

Three parts, each a line of JSON or more; exits with 1 where one is not as it should be.

bits: a run is trained twice, `optimizer.offload: none` and `host`, in full and in float32, with micro-batches that add
up, clipping, groups and decay: a tiny model on 1, 2 and 4 processes, and ``--model``, if given, on one. The SHA-256 of
all tensors of the last checkpoint, and losses and norms of every step, must be the same.

meshes: states of the tiny model, drawn at random, are saved by one process and carried to 2, 4, 2 x 2 (replicas of
shards) and back to 1, loaded and saved by each: the SHA-256 of all tensors must stay.

bytes: what a trained parameter takes on the device and on the host, as predicted for a GPU; and what the tensors of
this process take where the host is the device. tools/predict_campaign.py holds predictions against an allocator's
counts, states on the host among them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.commands import asked, read_lines, some, trained, workplace

if TYPE_CHECKING:
    from tuner.profile.prediction import Part

RECIPE = Path(__file__).with_suffix(".yaml")
DETERMINED = ("step", "loss", "grad_norm", "lr", "tokens")
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
CARRIED = (1, 2, 4, -4, 1)
"""Processes that the states pass through; -4 are two copies of two shards."""


def trained_run(directory: Path, offload: str, processes: int, words: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Train a run; the SHA-256 of its last checkpoint's tensors, and what the recipe determines in its log."""
    from tuner.checkpoint.load import content_sha256
    from tuner.checkpoint.open import newest

    name = f"{offload}-{processes}"
    flags = ["--name", name, "--optimizer.offload", offload, *words]
    trained(directory, processes, ["-m", "tuner", "train", "r.yaml", *flags])
    found = newest(directory / "runs" / name / "checkpoints")
    assert found is not None
    lines = read_lines(directory / "runs" / name / "metrics.jsonl")
    return content_sha256(found), [{key: line.get(key) for key in DETERMINED} for line in lines]


def bits(processes_of_tiny: list[int], model: Path | None, steps: int) -> Iterator[dict[str, Any]]:
    """Runs with states on either side."""
    from tests.fixtures import trainings

    tiny = [("tiny", processes) for processes in processes_of_tiny]
    for of, processes in (*tiny, *([] if model is None else [(model.name, 1)])):
        with workplace() as directory:
            words = ["--tokenizer.name_or_path", "byte"]
            trainings.prepare(directory, 1)
            shutil.copy(RECIPE, directory / "r.yaml")
            if of != "tiny" and model is not None:
                words = ["--model.name_or_path", str(model.resolve()), "--train.duration", f"{steps} steps"]
            runs = [trained_run(directory, side, processes, words) for side in ("none", "host")]
        (one, log), (other, other_log) = runs
        yield {
            "part": "bits", "model": of, "processes": processes, "steps": len(log), "device": one, "host": other,
            "good": one == other and log == other_log and len(log) > 1,
        }  # fmt: skip


def carried() -> Iterator[dict[str, Any]]:
    """States through every mesh."""
    from tests.train.synthetic import write_model
    from tuner.checkpoint.load import content_sha256
    from tuner.checkpoint.open import open_checkpoint

    with workplace() as directory:
        first = None
        write_model(directory / "model")
        (directory / "model" / "rows.jsonl").touch()
        for number, processes in enumerate(CARRIED):
            words = ["-m", "tools.host_campaign", "--carry", str(number), str(processes)]
            trained(directory, abs(processes), words)
            info = open_checkpoint(directory / "checkpoints" / f"step-{number}")
            found = content_sha256(info)
            first = first or found
            moments = sum(name.startswith("optimizer/") for name in info.index())
            yield {"part": "meshes", "processes": processes, "sha256": found, "good": found == first and moments > 0}


def carry(number: int, processes: int) -> None:
    """One process of a mesh: load what the mesh before saved, and save it."""
    import torch

    from tests.train.synthetic import assembly_for, recipe_for
    from tuner.checkpoint.load import load_into
    from tuner.checkpoint.open import open_checkpoint
    from tuner.checkpoint.save import CheckpointDir, save
    from tuner.runtime.dist import RankInfo
    from tuner.runtime.parts import local
    from tuner.runtime.process import process_group
    from tuner.setup.build import run_tensors

    rank_info = RankInfo.from_environment()
    if processes < 0:
        rank_info = RankInfo(rank_info.rank, -processes, rank_info.rank % 2, 2)
    parallel = {"shard": "hybrid" if processes < 0 else "full"}
    recipe = recipe_for(Path("model"), optimizer={"offload": "host", "lr": 1e-3}, parallel=parallel)
    checkpoints = Path("checkpoints")
    with process_group(rank_info, "cpu", 120):
        tensors = run_tensors(assembly_for(recipe, [5] * 8, rank_info).train_state)
        if number:
            load_into(open_checkpoint(checkpoints / f"step-{number - 1}"), tensors)
        else:
            for seed, tensor in enumerate(tensors.values()):
                local(tensor).normal_(generator=torch.Generator().manual_seed(seed))
        save(CheckpointDir(checkpoints, "carried"), number, tensors, {}, {})


def counted(model: Path) -> Iterator[dict[str, Any]]:
    """Bytes of a trained parameter on either side."""
    import torch

    from tuner.config.load import load_recipe
    from tuner.profile.devices import find_device
    from tuner.profile.predict import Target, predict
    from tuner.runtime.dist import RankInfo
    from tuner.setup.resolve import resolve
    from tuner.setup.specs import meta_model_of
    from tuner.train.optimizer import build_optimizer

    card = find_device("h100-80g")
    for offload in ("none", "host"):
        tree = {
            "model": {"name_or_path": str(model)}, "data": {"train": "rows.jsonl", "max_length": 256},
            "train": {"precision": "bf16"}, "optimizer": {"offload": offload, "lr": 1e-3},
            "checkpoint": {"async_save": False},
        }  # fmt: skip
        recipe = load_recipe(tree).recipe
        memory = predict(recipe, Target(card, RankInfo(), card.memory_bytes)).memory
        whole = meta_model_of(resolve(recipe, 256, RankInfo(), facts=card.facts()))
        count = sum(parameter.numel() for parameter in whole.parameters())
        moment = memory.peak_of("optimizer")
        assert moment is not None
        parts = {part: moment.parts[part] / count for part in PARTS}
        here = {name: torch.nn.Parameter(torch.empty_like(p, device="cpu")) for name, p in whole.named_parameters()}
        made = build_optimizer(recipe.optimizer, here)
        moments = sum(tensor.nbytes for tensor in made.state_tensors().values())
        kept = sum(tensor.nbytes for tensor in made.local_tensors())
        on_host = memory.host.get("optimizer", 0) / count
        good = abs(parts["optimizer"] - (0 if offload == "host" else 8)) < 0.1 and moments == 8 * count
        good = good and abs(on_host - (kept / count if offload == "host" else 0)) < 1e-4
        yield {
            "part": "bytes", "offload": offload, "parameters": count, "on_device": parts, "on_host": on_host,
            "moments": moments / count, "moments_and_buffers": kept / count, "good": good,
        }  # fmt: skip


def main() -> int:
    """Run all parts, or be one process of a mesh."""
    options = asked(
        __doc__, model=(Path, "a directory with a model whose run and bytes are compared, too"),
        steps=(20, "of its run"), parts=some(("bits", "meshes", "bytes")),
        processes=([1, 2, 4], "of the tiny model's runs"), carry=({"type": int, "nargs": 2}, argparse.SUPPRESS),
    )
    if options.carry is not None:
        carry(*options.carry)
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    made = {"bits": lambda: bits(options.processes, options.model, options.steps), "meshes": carried}
    if options.model is not None:
        made["bytes"] = lambda: counted(options.model)
    good = True
    for part in options.parts:
        for found in made[part]() if part in made else ():
            print(json.dumps(found), flush=True)
            good = good and found["good"]
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
