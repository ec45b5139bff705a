"""What a launch settles once for all of its processes: as its run had it before, or by prediction.

A process that trains predicts itself, with the libraries that it has. One that starts ranks and takes no part leaves
that to another: it would keep a context of the device for as long as they train. The outcome is kept in the cache of
prepared data, by what it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tuner.config.load import LoadedRecipe, load_recipe, recipe_dict
from tuner.errors import TunerError, first_line
from tuner.run.parts.part import Preflight
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.environment import python_path, versions
from tuner.runtime.files import hash_of, keep_json, read_json, scratch_dir, write_json
from tuner.runtime.process import from_rank0
from tuner.setup import settled as keys

if TYPE_CHECKING:
    from tuner.profile.predict import Target


JOB, ANSWER, CHOICES = "job.json", "answer.json", "choices"
LONGEST_S = 600
"""Seconds after which a prediction is given up."""
STEP_BYTES = 128 << 20
"""Free memory is rounded down to a multiple of this size, so that an empty device gives the same choice each time."""
PARTS = ("model", "tokenizer", "adapter", "method", "data", "train", "optimizer", "eval", "checkpoint", "parallel")
"""Sections that a prediction depends on."""


@dataclass(frozen=True)
class LaunchData:
    """Where a launch has its data, where outcomes are kept, whether other ranks of it wait for this process, and
    whether it only starts ranks."""

    data: Path
    cache: Path
    is_shared: bool = False
    starts: bool = False

    @staticmethod
    def of(data: Path, cache: Path, is_planned: bool, starts: bool = False) -> LaunchData:
        """That of this process; ranks that it starts itself, or only plans, are none that wait."""
        return LaunchData(data.absolute(), cache, RankInfo.is_given() and not is_planned, starts)


def run_before(recipe: LoadedRecipe | None, record: Mapping[str, Any] | None, processes: int) -> dict[str, Any]:
    """What a run that is resumed had, by key: all that is predicted, and how so many processes sharded it last."""
    if recipe is None or record is None:
        return {}
    values = {key: keys.value_of(recipe.recipe, key) for key in keys.WITHOUT_PREDICTION}
    alike = [launch for launch in record["launches"] if launch.get("world_size") == processes]
    values[keys.SHARD] = keys.settled_in({"launches": alike}).get(keys.SHARD, "auto")
    return {key: value for key, value in values.items() if value != "auto"}


def settle(
    loaded: LoadedRecipe, before: Mapping[str, Any], rank_info: RankInfo, place: LaunchData, console: Console
) -> keys.Settled:
    """Settle what a recipe leaves open, and its global batch where the default does not divide.

    Without a CUDA device nothing is predicted. Every rank gets what rank 0 finds.
    """
    processes = rank_info.world_size
    settled = keys.whole_batches(loaded, processes)
    recipe = settled.of(loaded.recipe)
    predicts = on_cuda(recipe.train.device)
    usual: Mapping[str, Any] = {} if predicts else keys.WITHOUT_PREDICTION
    had = {key: value for key, value in before.items() if value != usual.get(key)}
    kept = {key: had[key] for key in keys.left_open(recipe, processes) if key in had}
    if recipe.train.global_batch_size % (kept.get(keys.MICRO, 1) * keys.data_processes(recipe.parallel, processes)):
        kept.pop(keys.MICRO, None)
    settled = settled.and_also(keys.Settled(kept, dict.fromkeys(kept, "as the run had it")))
    recipe = settled.of(recipe)
    still_open = keys.left_open(recipe, processes)
    if still_open == (keys.SHARD,) and len(keys.ways_to_shard(recipe, rank_info)) == 1:
        return settled  # there is nothing to choose
    if not predicts or not still_open:
        return settled
    job = {
        "recipe": recipe_dict(recipe), "ranks": asdict(rank_info), "data": str(place.data), "cache": str(place.cache),
    }  # fmt: skip

    def predicted() -> str:
        doing = "choosing micro-batch size, recomputing, sharding and offload by prediction"
        with startup.phase("prediction"), console.doing(doing):
            answer = _asked(job) if place.starts else _answered(job)
        return json.dumps(answer)

    timeout_s = recipe.parallel.timeout.seconds
    answer = json.loads(from_rank0(rank_info, timeout_s, "settled", predicted) if place.is_shared else predicted())
    if "error" in answer:
        console.warn(f"memory cannot be predicted: {answer['error']}")
        values = {key: keys.WITHOUT_PREDICTION[key] for key in still_open if key in keys.WITHOUT_PREDICTION}
        return settled.and_also(keys.Settled(values, dict.fromkeys(values, f"not predicted: {answer['error']}")))
    return settled.and_also(keys.Settled(answer["values"], answer["reasons"]))


def on_cuda(device: str) -> bool:
    """Whether a recipe's device is a GPU here."""
    return device != "cpu" and torch.cuda.is_available()


def _asked(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a process of its own: values and reasons, or the error for which there are none."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    with scratch_dir("tuner-settle-") as directory:
        write_json(directory / JOB, dict(job))
        command = [sys.executable, "-m", __name__, str(directory)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment,
                timeout=LONGEST_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        with suppress(TunerError):
            return read_json(directory / ANSWER)
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"the process that predicts ended with code {done.returncode}: {last}"}


def _answered(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of this process; what it draws and warns of on the way is nothing that training sees."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return answer_of(job)
    except Exception as error:  # noqa: BLE001 - told to whoever asked, who continues without
        return {"error": first_line(error if isinstance(error, TunerError) else f"{type(error).__name__}: {error}")}


def answer_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Choose for the device that is here, or find what was chosen for the same before."""
    from tuner.profile.choose import choose
    from tuner.profile.devices import present_device
    from tuner.profile.predict import Target

    recipe, rank_info = load_recipe(job["recipe"]).recipe, RankInfo(**job["ranks"])
    device = present_device("cuda")
    limit, host = (size // STEP_BYTES * STEP_BYTES for size in (device.memory_bytes, device.host_bytes))
    target = Target(device, rank_info, limit, host // rank_info.local_world_size)
    kept = Path(job["cache"]) / CHOICES / f"{_key(job, target)}.json"
    with suppress(TunerError, OSError, KeyError, TypeError, ValueError):
        known = read_json(kept)
        values, wanted = keys.meaningful(known.get("values")), keys.left_open(recipe, rank_info.world_size)
        if set(values) == set(wanted) and _is_alike(known, target):
            return {"values": values, "reasons": {key: str(known["reasons"][key]) for key in wanted}}
    settled, prediction = choose(recipe, target, Path(job["data"]))
    answer = {"values": dict(settled.values), "reasons": dict(settled.reasons)}
    keep_json(kept, {**answer, "host": [prediction.host_bytes, target.host_bytes]})
    return answer


def _is_alike(known: Mapping[str, Any], target: Target) -> bool:
    """Whether the host had as much free memory for a choice as it has now, or twice what the choice takes both times:
    what is free of a host is never the same twice, and few choices ask for any."""
    takes, had = (int(size) for size in known["host"])
    has = target.host_bytes or 0
    return had == has or 2 * takes <= min(had, has)


def _key(job: Mapping[str, Any], target: Target) -> str:
    """What a choice depends on, in short: the recipe, its model's config and data, the device, the libraries."""
    recipe = {name: job["recipe"][name] for name in PARTS}
    recipe["train"] = {**recipe["train"], "duration": None, "stop_after": None}
    config = Path(recipe["model"]["name_or_path"], "config.json")
    facts = {
        "recipe": recipe,
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "data": Path(job["data"]).name,
        "ranks": {**job["ranks"], "rank": 0, "local_rank": 0},
        "device": [target.device.shown, target.limit_bytes],
        "versions": versions(),
    }
    return hash_of(facts, 16)


def main() -> None:
    """Answer the job in the directory that is named on the command line."""
    place = Path(sys.argv[1])
    write_json(place / ANSWER, _answered(read_json(place / JOB)))


def settled_for(
    ready: Preflight, loaded: LoadedRecipe, rank_info: RankInfo, place: LaunchData, console: Console
) -> keys.Settled:
    """What is settled once for all ranks of a launch: as the run had it, or predicted.

    Where torchrun or srun started them, rank 0 settles it and the others wait; or this process does, which starts them.
    """
    record = ready.status.record
    before = run_before(ready.status.run.recipe(record), record, rank_info.world_size)
    return settle(loaded, before, rank_info, place, console)


if __name__ == "__main__":
    main()
