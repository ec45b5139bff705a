"""What an export says about itself: a model card for people and `tuner.json` for programs, both without local paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonlines
import torch
import transformers

import tuner
from tuner.config.dump import flow
from tuner.errors import counted
from tuner.export.quantized_card import quantized_rows, quantized_usage
from tuner.export.scoring import scoring
from tuner.export.source import Source, hub_name
from tuner.rundir.layout import METRICS

if TYPE_CHECKING:
    from tuner.export.merges import Merge

CARD = "README.md"
SCHEMA_VERSION = 1
POINTS = 12
"""Lines of each kind that are kept of `metrics.jsonl`."""
_DETERMINED = ("step", "epoch", "tokens", "loss", "lr", "grad_norm")
_SHOWN = ("method", "train", "optimizer", "schedule", "adapter", "seed")


def lineage(source: Source, manifest_sha256: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Where the weights come from: checkpoint, base model, data key, recipe and versions. No clock, no paths."""
    state, meta = source.checkpoint.state, source.meta
    return {
        "schema_version": SCHEMA_VERSION,
        "export": dict(options),
        "source": {
            "run": str(source.recipe.get("name") or source.run_dir.name),
            "step": source.step,
            "tokens": state.get("tokens"),
            "trained_tokens": state.get("trained_tokens"),
            "manifest_sha256": manifest_sha256,
            "data_key": meta.get("data_key"),
            "tokenizer_hash": meta.get("tokenizer_hash"),
            "frozen_hash": meta.get("frozen_hash"),
        },
        "data": meta.get("data") or {},
        "metrics": curve(source.run_dir, source.step),
        "base_model": {
            "name": source.hub_name,
            "revision": source.model.get("revision"),
            "init": source.model.get("init"),
            "licence": source.model.get("licence"),
        },
        "recipe": without_paths({key: source.recipe[key] for key in _SHOWN if key in source.recipe}),
        "versions": {"tuner": tuner.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def base_facts(source: Source, merge: Merge, is_kept: bool) -> dict[str, Any]:
    """How the base was quantised, what the adapter was merged into, and how far both ways are from the trained model.

    A kept adapter finds here what it takes to make its base again: the type of its weights, and modules left out.
    """
    adapter = source.adapter or {}
    return {
        "kind": source.quantize,
        "dtype": source.recipe.get("model", {}).get("dtype"),
        "left_out": list(adapter.get("modules_to_save", ())),
        "merged_into": None if is_kept else merge.base,
        "kl": merge.kl,
        "tokens": merge.tokens,
    }


def curve(run_dir: Path, last_step: int) -> dict[str, list[dict[str, Any]]]:
    """Lines of training, evenly thinned to a dozen with the last one, and all evaluations, thinned likewise.

    Empty lists where there are none. Lines that are cut short are passed over.
    """
    found: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    path = run_dir / METRICS
    if path.is_file():
        with jsonlines.open(path) as reader:
            for line in reader.iter(type=dict, skip_invalid=True):
                if line.get("kind") in found and isinstance(line.get("step"), int) and line["step"] <= last_step:
                    found[line["kind"]].append({key: line[key] for key in _DETERMINED if line.get(key) is not None})
    return {kind: thinned(lines) for kind, lines in found.items()}


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most a dozen of them, the first and the last among these."""
    if len(lines) <= POINTS:
        return lines
    return [lines[round(i * (len(lines) - 1) / (POINTS - 1))] for i in range(POINTS)]


def without_paths(value: Any) -> Any:
    """The value with every local path in it cut to its last component."""
    if isinstance(value, Mapping):
        return {str(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return os.path.basename(value.rstrip("/"))
    return value


def card(source: Source, facts: Mapping[str, Any], is_adapter: bool, is_padded: bool) -> str:
    """The README.md of the export: front matter that hubs read, how it was trained, how to load it."""
    base = hub_name(str(source.model.get("name_or_path", ""))) if source.hub_name else None
    title = _one_line(str(facts["source"]["run"]))
    task = "text-classification" if source.head == "score" else "text-generation"
    task = "image-text-to-text" if _is_whole(source, facts) else task
    front = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", f"pipeline_tag: {task}"]
    if base:
        front += [f"base_model: {base}", f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"]
    if licence := facts["base_model"]["licence"]:
        front.append(f"license: {licence}")
    front += ["tags:", "- tuner", *(["- reward-model"] if source.head == "score" else []), "---", ""]
    rows = [(key, value) for key, value in _facts(source, facts, base) if value is not None]
    table = ["| | |", "|---|---|", *(f"| {key} | {_one_line(str(value))} |" for key, value in rows)]
    config, is_whole = source.model.get("config") or {}, _is_whole(source, facts)
    config = config if "vocab_size" in config else config.get("text_config") or {}
    size = config.get("vocab_size") if source.new_ids else None
    usage, losses = _usage(is_adapter, size, is_whole), _losses(facts["metrics"])
    usage += quantized_usage(facts, is_whole) if is_adapter else []
    if source.head == "score":
        usage = scoring(source, is_adapter, size, is_padded)
    return "\n".join([*front, f"# {title}", "", *table, "", *usage, "", *losses, *_settings(facts)])


def _losses(metrics: Mapping[str, list[Mapping[str, Any]]]) -> list[str]:
    """The loss over the run as a table; nothing where it was not kept."""
    evaluated = {line["step"]: line.get("loss") for line in metrics["eval"]}
    trained = {line["step"]: line for line in metrics["train"]}
    steps = sorted(evaluated.keys() | trained.keys())
    if not steps:
        return []
    lines = ["## Loss", "", "| step | tokens | loss | eval loss | learning rate |", "|---|---|---|---|---|"]
    for step in steps:
        line = trained.get(step, {})
        tokens = f"{line['tokens']:,}" if "tokens" in line else ""
        figures = (_figure(line.get("loss")), _figure(evaluated.get(step)), _figure(line.get("lr"), ".3g"))
        lines.append(f"| {step:,} | {tokens} | {' | '.join(figures)} |")
    return [*lines, ""]


def _figure(value: Any, form: str = ".4f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else ""


def _settings(facts: Mapping[str, Any]) -> list[str]:
    """The recipe, as far as it decides the weights."""
    lines: list[str] = []
    for key, value in facts["recipe"].items():
        section = value.items() if isinstance(value, Mapping) else ()
        lines += (
            [f"{key}:", *(f"  {name}: {flow(item)}" for name, item in section)]
            if section
            else [f"{key}: {flow(value)}"]
        )
    return ["## Recipe", "", "```yaml", *lines, "```", ""] if lines else []


def _facts(source: Source, facts: Mapping[str, Any], base: str | None) -> list[tuple[str, Any]]:
    recipe, from_source, export = facts["recipe"], facts["source"], facts["export"]
    random_init = source.model.get("init") == "random"
    tokens = from_source["tokens"]
    return [
        ("licence of the base model", facts["base_model"]["licence"]),
        ("base model", base or ("none: trained from random weights" if random_init else "a local directory")),
        ("method", recipe.get("method", {}).get("kind")),
        ("adapter", _adapter_text(source, str(export["adapter"]))),
        *quantized_rows(facts),
        ("optimizer steps", f"{source.step:,}"),
        ("data key", from_source["data_key"]),
        *((f"{split} data", _counts(counts)) for split, counts in facts["data"].items()),
        ("tokens seen", f"{tokens:,}" if isinstance(tokens, int) else None),
        ("new tokens", len(source.new_ids) or None),
        ("not trained", _untouched(source.model["untouched"]) if _is_whole(source, facts) else None),
        ("weights", ", ".join(filter(None, (export["dtype"], export.get("weights"))))),
        *_rounding(facts),
        ("trained with", f"tuner {facts['versions']['tuner']}"),
    ]


def _rounding(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What rounding keeps of the training, where something was rounded, or would have been."""
    return [
        (what, f"{kept['share']:.0%} of what training changed (KL {kept['kl']:.2g} of {kept['gain']:.2g} nats a token)")
        for what, kept in (("kept", facts.get("kept")), ("bf16 would keep", facts.get("bf16_kept")))
        if kept
    ]


def _is_whole(source: Source, facts: Mapping[str, Any]) -> bool:
    """Whether it is, or fits, a whole multimodal checkpoint."""
    return bool(source.model.get("untouched")) and not facts["export"].get("text_only")


def _untouched(left: Mapping[str, Any]) -> str:
    """What of a multimodal checkpoint was not trained, in words."""
    tensors = counted(left["tensors"], "tensor")
    return f"what is no part of the language model: {tensors} ({left['bytes'] / 1e6:,.1f} MB)"


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in ("rows", "tokens", "trained_tokens"))


def _adapter_text(source: Source, mode: str) -> str | None:
    adapter = source.adapter
    if adapter is None:
        return None
    how = "merged into the weights" if mode == "merge" else "kept apart"
    name = "DoRA" if adapter.get("kind") == "dora" else "LoRA"
    scale = " over the root of r" if adapter.get("use_rslora") else ""
    saved = adapter.get("modules_to_save")
    full = f", {', '.join(saved)} trained in full" if saved else ""
    experts = ", of routed experts too" if adapter.get("experts") else ""
    return f"{name}, r {adapter.get('r')}, alpha {adapter.get('alpha'):g}{scale}{experts}{full}, {how}"


def _usage(is_adapter: bool, vocabulary: int | None, is_whole: bool) -> list[str]:
    """How to load it; an adapter with new tokens needs a base model with room for this vocabulary."""
    model = "AutoModelForMultimodalLM" if is_whole else "AutoModelForCausalLM"
    tokens = "AutoProcessor" if is_whole else "AutoTokenizer"
    lines = ["```python", f"from transformers import {model}, {tokens}"]
    if is_adapter:
        lines += ["from peft import PeftModel", "", f"base = {model}.from_pretrained(BASE_MODEL)"]
        lines += [] if vocabulary is None else [f"base.resize_token_embeddings({vocabulary})"]
        lines += ["model = PeftModel.from_pretrained(base, DIRECTORY)"]
    else:
        lines += ["", f"model = {model}.from_pretrained(DIRECTORY)"]
    if is_whole:
        return [*lines, f'processor = {tokens}.from_pretrained({"BASE_MODEL" if is_adapter else "DIRECTORY"})', "```"]
    return [*lines, "tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)", "```"]


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).replace("|", "\\|").split())
