"""Runs that are there already: what a launch, a resume and an evaluation say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_place import Case
from tools.advice.hint_words import RUN, Way

LORA = {"adapter.kind": "lora", "adapter.r": 4}
TRAIN = "train r.yaml"
OTHER: Way = {"--name": "other"}
EXPORTED: Way = {"model.name_or_path": "runs/r/exports/step-2"}
RESUMED: Way = {RUN: ["resume runs/r"]}


def checkpoints(place: Path) -> list[Path]:
    """Those of the run."""
    return sorted((place / "runs/r/checkpoints").iterdir())


def pairs(place: Path) -> None:
    """Preferences."""
    rows = ({"prompt": f"{number} ", "chosen": "ab", "rejected": "ba"} for number in range(24))
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_manifest(place: Path) -> None:
    """No checkpoint of the run can be read."""
    for checkpoint in checkpoints(place):
        (checkpoint / "manifest.json").write_text("{")


def after(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What is said of a finished run by another launch of its recipe."""
    return Case(site, recipe, meant, **{"start": "run", "words": TRAIN, **more})


LAUNCHES = (
    after("run/status.py:_another_recipe", {"optimizer.lr": 1e-3}, {"--reset": "optimizer.arguments",
        "--resume": "must"}, OTHER),
    after("run/status.py:_branch_point: leave out", {}, {"--resume": None}, start="model",
        words=f"{TRAIN} --resume must"),
    after("run/status.py:_own_checkpoint: resume it:", {}, RESUMED, OTHER, start="stopped", instead=True),
    after("run/status.py:resume_source: start it", {}, {RUN: ["train r.yaml"]}, start="model", words="resume runs/r",
          change=lambda place: (place / "runs/r").mkdir(parents=True), reading={"tuner train": "tuner train r.yaml"}),
    after("run/status.py:status_of", {}, {"--resume": "auto"}, {"--resume": "must"},
        words=f"{TRAIN} --reset optimizer --resume never",
          reading={"auto, must or a PATH": "auto or --resume must"}),
    after("run/preflight.py:_data_dir: run tuner", {}, {RUN: ["prepare-data r.yaml"]}, {"--no-prepare": None},
          start="model", words=f"{TRAIN} --no-prepare",
              reading={"run tuner prepare-data first": "run tuner prepare-data r.yaml"}),
    after("run/changes.py:freed_keys", {"optimizer.kind": "muon", "optimizer.lr": 1e-3}, {"--reset": "optimizer"},
          words=f"{TRAIN} --resume must --reset optimizer.arguments"),
)  # fmt: skip
EVALUATIONS = (
    after("run/score.py:score: name them", {}, {"--data.eval": "rows.jsonl"}, {"--data.eval": "2%"},
        words="eval runs/r r.yaml",
          reading={"FILE, or 2%": "rows.jsonl, or --data.eval 2%"}),
    after("run/prepare_reference.py:_computed", {"method.kind": "dpo", "data.train": "pairs.jsonl", **LORA},
          {"--reference": None}, {"method.reference": "columns"}, change=pairs, start="model",
          words="prepare-data r.yaml --reference",
          reading={"leave it out": "leave out --reference"}),
    after("run/verify.py:_start", {}, {"--steps": "1"}, words="verify-resume runs/r --steps 2",
          dear=True),
)  # fmt: skip
MODELS = (
    after("rundir/base_model.py:_is_a_run: export it first", {"model.name_or_path": "./runs/r", "name": "other"},
          {RUN: ["export-hf runs/r"], **EXPORTED}),
    after("rundir/base_model.py:_is_a_run: it has no", {"model.name_or_path": "./runs/r", "name": "other"},
        {RUN: ["resume runs/r", "export-hf runs/r"], **EXPORTED},
          start="begun", reading={"that directory": "runs/r/exports/step-2"}),
    after("rundir/base_model.py:_is_a_run: it has no", {"model.name_or_path": "./runs/r", "name": "other"},
          {RUN: ["resume runs/r --checkpoint.at_end true", "export-hf runs/r"], **EXPORTED},
          start="unsaved", reading={"that directory": "runs/r/exports/step-2"}),
    after("rundir/model_path.py:way_to_save: train it first", {}, RESUMED, start="begun", words="export-hf runs/r"),
    after("rundir/model_path.py:way_to_save: train it again", {}, {RUN: ["resume runs/r --checkpoint.at_end true"]},
        start="unsaved", words="export-hf runs/r"),
    after("rundir/record.py:read_run: see which", {}, {RUN: ["runs list runs"]}, words="runs show runs", instead=True),
)
CASES = (*LAUNCHES, *EVALUATIONS, *MODELS)
