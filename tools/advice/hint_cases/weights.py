"""Weights that a model is given at its start (`model.init_from`), and do not fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.advice.hint_cases.setup import check
from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import Way

ADAPTED = {
    "adapter.kind": "lora",
    "adapter.r": 4,
    "adapter.alpha": 8,
    "adapter.target_modules": ["q_proj", "down_proj"],
}
SECTION = {key.partition(".")[2]: value for key, value in ADAPTED.items()}
HEAD, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def taken(**keys: Any) -> Way:
    """Take the other weights, with these keys."""
    return {"model.init_from": [{"path": "other", **keys}]}


def given(site: str, entry: Way, change: Change, *meant: Way, said: dict[str, Way] | None = None) -> Case:
    """What is said of weights; `said` has what a phrase of a message means as an entry."""
    reading = {
        phrase: f"write model.init_from: {json.dumps(way['model.init_from'])}" for phrase, way in (said or {}).items()
    }
    reading["set adapter.kind,"] = f"write adapter: {json.dumps(SECTION)},"
    return check(f"init_from/{site}", entry, *meant, change=change, reading=reading)


def adapter(place: Path) -> None:
    """An adapter as peft saves it."""
    from tests.init_from.built import write_peft

    write_peft(place / "model", place / "other")


def other(names: Mapping[str, str | None] = MappingProxyType({}), rows: int = 300) -> Change:
    """The weights of another model, some under other names or left out, or with fewer embeddings."""

    def change(place: Path) -> None:
        from safetensors.torch import load_file, save_file

        (place / "other").mkdir()
        (place / "other" / "config.json").write_text((place / "model" / "config.json").read_text())
        held = load_file(place / "model" / "model.safetensors")
        renamed = ((names.get(name, name), tensor) for name, tensor in held.items())
        tensors = {name: tensor for name, tensor in renamed if name is not None}
        tensors[HEAD] = tensors[HEAD][:rows].clone()
        save_file(tensors, place / "other" / "model.safetensors")

    return change


WRONG, LOOSE = {Q: Q.replace("q_proj", "qproj")}, taken(strict=False)
GLOBS = {"**.weight": "{1}.weight", Q: Q}
CASES = (
    given(
        "adapters.py:give_adapter: set",
        taken(adapter="keep"),
        adapter,
        {"adapter": SECTION},
        taken(adapter="merge"),
        said={"write adapter: merge": taken(adapter="merge")},
    ),
    given(
        "adapters.py:give_adapter: write",
        {**taken(), **ADAPTED, "adapter.kind": "dora"},
        adapter,
        {"adapter.kind": "lora"},
    ),
    given(
        "adapters.py:_keep",
        {**taken(), **ADAPTED, "adapter.alpha": 16},
        adapter,
        {"adapter.r": 4, "adapter.alpha": 8, "adapter.use_rslora": False},
    ),
    given(
        "fit.py:fit",
        taken(),
        other(rows=290),
        taken(grow=True),
        taken(exclude=[HEAD]),
        said={"write grow: true": taken(grow=True), f"leave it out: exclude: [{HEAD}]": taken(exclude=[HEAD])},
    ),
    given(
        "fit.py:takes",
        {**taken(load=[Q]), **ADAPTED, "model.quantize": "nf4"},
        other(),
        {"model.quantize": "none"},
    ),
    given(
        "match.py:_chosen",
        taken(rename=GLOBS),
        other(),
        taken(rename=dict(reversed(GLOBS.items()))),
        said={"write it before that one": taken(rename=dict(reversed(GLOBS.items())))},
    ),
    given(
        "match.py:_without_place",
        taken(),
        other(WRONG),
        LOOSE,
        taken(rename={WRONG[Q]: Q}),
        said={"write strict: false": LOOSE, "rename it,": taken(rename={WRONG[Q]: Q})},
    ),
    given(
        "match.py:_require_all",
        taken(),
        other({Q: None}),
        LOOSE,
        taken(load=["model.layers.1"]),
        said={"write strict: false": LOOSE, "say which to take with load": taken(load=["model.layers.1"])},
    ),
)
