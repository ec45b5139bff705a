"""Runs that are resumed after something about them changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tools.advice.hint_cases.runs import OTHER, RESUMED, checkpoints, without_manifest
from tools.advice.hint_place import Case
from tools.advice.hint_words import RUN, Way

AGAIN: Way = {RUN: ["train r.yaml --resume must"]}
TAUGHT = {"method.kind": "distill", "method.teacher": "./t/step-1"}
FROM = "runs/r/checkpoints/step-1"
RESET = {"train.duration": "3 steps", "checkpoint.every": "1 steps", "checkpoint.keep": 3}


def again(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What is said of a run that was stopped by another launch of its recipe."""
    return Case(site, recipe, meant, **{"start": "stopped", "words": "train r.yaml --resume auto", **more})


def more_rows(place: Path) -> None:
    """Another row."""
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "new", "completion": "b"}\n')


def only(steps: int) -> Any:
    """No checkpoints but the first so many."""

    def change(place: Path) -> None:
        for checkpoint in checkpoints(place)[steps:]:
            shutil.rmtree(checkpoint)

    return change


NAMED = {"with --name": "with --name other"}
BEGINNING = {RUN: ["mv runs/r/checkpoints runs/r/damaged-checkpoints", "resume runs/r"]}


def forgotten(place: Path) -> None:
    """A run whose recipe is gone."""
    (place / "runs/r/recipe.resolved.yaml").unlink()


def other_teacher(place: Path) -> None:
    """Another teacher than before."""
    from safetensors.torch import load_file, save_file

    path = place / "t/step-1/model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


CASES = (
    again(
        "run/status.py:resume_source: name its",
        {},
        AGAIN,
        start="begun",
        words="resume runs/r",
        change=forgotten,
        instead=True,
    ),
    again(
        "run/status.py:_own_checkpoint: resume it with",
        {},
        {"--resume": "must"},
        OTHER,
        start="begun",
        words="train r.yaml",
        change=forgotten,
    ),
    again(
        "rundir/model_path.py:way_to_save: train it by",
        {},
        {RUN: ["train r.yaml --resume must --checkpoint.at_end true"]},
        start="unsaved",
        words="export-hf runs/r",
        change=forgotten,
    ),
    again(
        "run/meta.py:require_same_data: restore it, or name its commit: method",
        TAUGHT,
        OTHER,
        start="taught",
        change=other_teacher,
        reading=NAMED,
        dear=True,
    ),
    again(
        "run/changes.py:resets_for: start",
        RESET,
        {RUN: ["train r.yaml --name other"]},
        start="reset",
        change=only(0),
        instead=True,
    ),
    again(
        "run/changes.py:resets_for: reset",
        RESET,
        {"--reset": "optimizer"},
        start="reset",
        change=only(1),
        reading={"optimizer.arguments,optimizer.state": "optimizer"},
    ),
    again("run/meta.py:require_same_data: ; or", {}, {"--reset": "data"}, OTHER, change=more_rows, reading=NAMED),
    again(
        "run/meta.py:require_same_data: \N{SECTION SIGN}",
        {},
        {"--reset": "data"},
        OTHER,
        change=more_rows,
        reading=NAMED,
        dear=True,
    ),
    again(
        "run/status.py:_require_same_branch",
        {},
        RESUMED,
        OTHER,
        words=f"train r.yaml --resume {FROM}",
        instead=True,
        dear=True,
    ),
    again(
        "run/status.py:_own_checkpoint: \N{SECTION SIGN}", {}, BEGINNING, OTHER, change=without_manifest, instead=True
    ),
    again(
        "run/status.py:_way_from",
        {"optimizer.lr": 1e-3, "name": "other"},
        {"--reset": "optimizer.arguments"},
        {"optimizer.lr": "auto"},
        words=f"train r.yaml --resume {FROM}",
        reading={"take the values of its run": "write optimizer.lr: auto"},
        dear=True,
    ),
)
