"""What an export says about itself: a model card for people and `tuner.json` for programs, both without local paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from jinja2 import Environment

import tuner
from tuner.config.yaml import flow
from tuner.export.source import ExportSource
from tuner.rundir.layout import METRICS, TOKENIZER
from tuner.rundir.records import Records
from tuner.runtime.files import read_json

if TYPE_CHECKING:
    from tuner.export.proof import Merge


CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
SCHEMA_VERSION = 1
POINTS = 12
"""Lines of each kind that are kept of `metrics.jsonl`."""
_DETERMINED = ("step", "epoch", "tokens", "loss", "lr", "grad_norm")
_SHOWN = ("method", "train", "optimizer", "schedule", "adapter", "seed")


def lineage(source: ExportSource, manifest_sha256: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Where the weights come from: checkpoint, base model, data key, recipe and versions. No clock, no paths."""
    state, meta = source.checkpoint.state, source.meta
    return {
        "schema_version": SCHEMA_VERSION,
        "export": dict(options),
        "source": {
            "run": str(source.recipe.get("name") or source.run_dir.name),
            "step": source.step,
            **{name: state.get(name) for name in ("tokens", "trained_tokens")},
            "manifest_sha256": manifest_sha256,
            **{name: meta.get(name) for name in ("data_key", "tokenizer_hash", "frozen_hash")},
        },
        "data": meta.get("data") or {},
        "metrics": curve(source.run_dir, source.step),
        "base_model": {
            "name": source.hub_name, "revision": source.revision, "init": source.model.get("init"),
            "licence": source.model.get("licence"),
        },
        "recipe": without_paths({key: source.recipe[key] for key in _SHOWN if key in source.recipe}),
        "versions": {"tuner": tuner.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def base_facts(source: ExportSource, merge: Merge, is_kept: bool) -> dict[str, Any]:
    """How the base was quantised, what the adapter was merged into, and how far both ways are from the trained model.

    A kept adapter finds here what it takes to make its base again: the type of its weights, and modules left out.
    """
    adapter = source.adapter or {}
    return {
        "kind": source.quantize, "dtype": source.model_section.get("dtype"),
        "left_out": list(adapter.get("modules_to_save", ())), "merged_into": None if is_kept else merge.base,
        "kl": merge.kl, "tokens": merge.tokens,
    }


def curve(run_dir: Path, last_step: int) -> dict[str, list[dict[str, Any]]]:
    """Lines of training, evenly thinned to a dozen with the last one, and all evaluations, thinned likewise.

    Empty lists where there are none. Lines that are cut short are passed over.
    """
    found: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for line in Records(run_dir / METRICS).read():
        if line.get("kind") in found and isinstance(line.get("step"), int) and line["step"] <= last_step:
            found[line["kind"]].append({key: line[key] for key in _DETERMINED if line.get(key) is not None})
    for kind, lines in found.items():
        if len(lines) > POINTS:
            found[kind] = [lines[round(i * (len(lines) - 1) / (POINTS - 1))] for i in range(POINTS)]
    return found


def without_paths(value: Any) -> Any:
    """The value with every local path in it cut to its last component."""
    if isinstance(value, Mapping):
        return {str(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return os.path.basename(value.rstrip("/"))
    return value


def card(source: ExportSource, facts: Mapping[str, Any], is_adapter: bool, is_padded: bool) -> str:
    """The README.md of the export: front matter that hubs read, how it was trained, how to load it."""
    model = source.model
    config = model.get("config") or {}
    config = config if "vocab_size" in config else config.get("text_config") or {}
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"flow": flow, "one_line": _one_line, "figure": _figure}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        base=source.hub_name,
        adapter=source.adapter,
        step=source.step,
        untouched=model.get("untouched"),
        quantized=facts.get("quantized_base"),
        lines={kind: {line["step"]: line for line in lines} for kind, lines in facts["metrics"].items()},
        new_tokens=len(source.new_ids),
        vocabulary=config.get("vocab_size") if source.new_ids else None,  # an adapter's base needs room for so many
        is_adapter=is_adapter,
        is_padded=is_padded,
        is_random=source.is_random,
        own_class=str(source.model_section.get("use") or "").rpartition(":")[2],
        is_score=source.head == "score",
        is_whole=bool(model.get("untouched")) and not facts["export"].get("text_only"),  # of a multimodal checkpoint
        has_template=source.head == "score" and _has_template(source.run_dir / TOKENIZER),
    )


def _figure(value: Any, form: str = ".4f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else ""


def _one_line(value: Any) -> str:
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return " ".join(text.replace("|", "\\|").split())


def _has_template(tokenizer: Path) -> bool:
    config = tokenizer / "tokenizer_config.json"
    in_config = config.is_file() and read_json(config).get("chat_template")
    return bool(in_config) or (tokenizer / "chat_template.jinja").is_file()
