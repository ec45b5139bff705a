"""What `tuner ladder` says of recipes of several sizes, and of points to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_cases.setup import family
from tools.advice.hint_place import Case, Change
from tools.advice.hint_starts import LADDER, SIZES
from tools.advice.hint_words import RUN, Way

PLAN = "ladder plan r.yaml"


def plan(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What planning a ladder says."""
    return Case(
        f"ladder/{site}", {**LADDER, **recipe}, meant, **{"words": PLAN, "start": "model", "dear": True, **more}
    )


def points(phase: str = "post-decay", size: str = "190M") -> Change:
    """Measured points with a bad line, and good ones."""

    def change(place: Path) -> None:
        good = "".join(f"{n}M,{40 * n}M,{3 + 100 / n}\n" for n in (10, 20, 40, 80, 160))
        (place / "good.csv").write_text(f"parameters,tokens,loss\n{good}")
        (place / "points.csv").write_text(f"parameters,tokens,loss,phase\n{size},4B,3,{phase}\n")

    return change


def taken(place: Path) -> None:
    """A page of somebody else's where the fit's goes."""
    points()(place)
    (place / "good.csv").rename(place / "points.csv")
    (place / "there.html").write_text("mine")


FIT, GOOD = "ladder fit points.csv", {RUN: ["mv good.csv points.csv"]}
PLANS = (
    plan("batch.py:solve: write ladder.mic", {"ladder.micro_batch_tokens": 100}, {"ladder.micro_batch_tokens": 64}),
    plan(
        "batch.py:solve: write ladder.max",
        {"ladder.min_processes": 4, "ladder.max_processes": 2, "ladder.tokens": 12288},
        {"ladder.max_processes": 4},
        {"ladder.min_processes": 2},
        reading={"smaller ladder.min_processes": "ladder.min_processes: 2"},
    ),
    plan(
        "rules.py:course",
        {"ladder.batch_tokens": 2048},
        {"ladder.multiples": [8, 16]},
        {"ladder.batch_tokens": "256"},
        reading={
            "larger ladder.multiples": "ladder.multiples: [8, 16]",
            "a smaller ladder.batch_tokens": "ladder.batch_tokens: '256'",
        },
    ),
    plan(
        "rungs.py:rungs_of: give",
        {"ladder.sizes": ["1M", "1000000"]},
        {"ladder.sizes": SIZES},
        start="model",
        reading={"give them names: {name: wide, config: {...}}": f"write sizes: {json.dumps(SIZES)}"},
    ),
    plan(
        "shapes.py:",
        {"ladder.sizes": ["1M", "2M"]},
        {"ladder.sizes": SIZES},
        change=family("gpt2"),
        reading={"write sizes as configs: {name: small, config: {...}}": f"write sizes: {json.dumps(SIZES)}"},
    ),
    plan(
        "record.py:read_ladder: start",
        {},
        {RUN: ["ladder run r.yaml"]},
        {RUN: [PLAN]},
        words="ladder metrics r.yaml",
        instead=True,
    ),
    Case(
        "config/ladder.py:require_one_run",
        LADDER,
        ({RUN: [PLAN]}, {RUN: ["ladder run r.yaml"]}),
        "train r.yaml",
        "model",
        reading={" [--rung NAME]": ""},
        instead=True,
        dear=True,
    ),
)
STARTED = (
    plan(
        "record.py:_require_same_plan",
        {"ladder.batch_tokens": 128},
        {"--name": "other"},
        {RUN: ["runs rm r/small", "runs rm r/large"]},
        words="ladder run r.yaml",
        start="laddered",
        reading={"tuner runs rm runs/r/small": "tuner runs rm r/small and tuner runs rm r/large"},
    ),
    plan(
        "points.py:read_points",
        {},
        {RUN: ["ladder metrics r.yaml > points.csv"]},
        words="ladder fit points.csv",
        start="laddered",
        reading={"LADDER": "r.yaml"},
        instead=True,
    ),
)
FITS = (
    Case(
        "ladder/fit_page.py:check_output",
        {},
        ({"--output": "new.html"},),
        f"{FIT} --output there.html",
        change=taken,
        reading={"--output": "--output new.html"},
    ),
    Case(
        "ladder/points.py:_size",
        {},
        (GOOD,),
        FIT,
        change=points(size="many"),
        reading={"write 190M, 3.8B or 1e9": "mv good.csv points.csv"},
    ),
    Case(
        "ladder/points.py:_is_decayed",
        {},
        (GOOD,),
        FIT,
        change=points(phase="late"),
        reading={"write pre-decay, post-decay or nothing": "mv good.csv points.csv"},
    ),
)
CASES = (*PLANS, *STARTED, *FITS)
