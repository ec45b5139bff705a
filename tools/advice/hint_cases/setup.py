"""What this machine and the model do not admit of a recipe: found by `config check`, or by a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model.tiny import tiny_config
from tools.advice.hint_cases.runs import pairs
from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import RUN, Way

LORA = {"adapter.kind": "lora", "adapter.r": 4}
DRY = "train r.yaml --dry-run"
RANDOM = {"model.init": "random"}
HELD_OUT = {"data.eval": "2%"}


def config(**values: Any) -> Change:
    """Change the model's config.json; its weights do not fit it any more."""

    def change(directory: Path) -> None:
        path = directory / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def family(name: str) -> Change:
    """The config of a tiny model of another family, without weights."""

    def change(directory: Path) -> None:
        tiny_config(name).save_pretrained(directory / "model")

    return change


def saved(name: str, **values: Any) -> Change:
    """The config of a tiny model of a type of transformers, without weights."""

    def change(directory: Path) -> None:
        from transformers import AutoConfig

        AutoConfig.for_model(name, vocab_size=300, hidden_size=32, **values).save_pretrained(directory / "model")

    return change


def check(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What `config check` finds with the model there."""
    return Case(site, recipe, meant, **{"start": "model", **more})


def dry(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What a dry run finds."""
    return check(site, recipe, *meant, words=DRY, **more)


NUMERICS = (
    check("setup/check.py:_check_values: write dtype: auto, or", {"model.dtype": "bf16", "train.precision": "bf16"},
          {"model.dtype": "auto"}, {"optimizer.rounding": "stochastic"}),
    check("setup/check.py:_check_values: write dtype: auto", {"model.dtype": "bf16", **LORA}, {"model.dtype": "auto"}),
    check("setup/check.py:_check_values: write auto", {"model.kernels": "liger"}, {"model.kernels": "auto"}),
    check("setup/check.py:_check_processes", {"parallel.processes": 3, "parallel.tensor": 2,
        "train.micro_batch_size": 1}, {"parallel.processes": 4},
          reading={"write a multiple of 2": "write parallel.processes: 4"}),
    dry("setup/resolve.py:_check_numerics: write kernels: auto or torch", {"model.kernels": "liger"},
        {"model.kernels": "auto"}, {"model.kernels": "torch"}),
    dry("setup/resolve.py:_check_numerics: write tf32", {"train.tf32": True}, {"train.tf32": False}),
    dry("setup/resolve.py:_check_numerics: write dtype: auto, train", {"model.dtype": "bf16",
        "train.precision": "bf16"},
        {"model.dtype": "auto"}, {"optimizer.rounding": "stochastic"}),
    dry("setup/resolve.py:_check_numerics: write dtype: auto, or", {"model.dtype": "bf16", **LORA},
        {"model.dtype": "auto"}, {"train.precision": "bf16"}),
)  # fmt: skip
MODELS = (
    check("model/adapter.py:_target_names", {**LORA, "adapter.modules_to_save": ["layers"]}, {"adapter.kind": "none"}),
    check("model/adapter.py:refuse_others", {**LORA, "adapter.target_modules": ["q_proj", "embed_tokens"]},
          {"adapter.modules_to_save": ["embed_tokens"], "adapter.target_modules": ["q_proj"]},
          reading={"leave it out there,": "write adapter.target_modules: [q_proj],"}),
    check("model/experts.py:", {**LORA, "adapter.experts": True}, {"adapter.experts": False}),
    check("train/optimizer.py:hidden_matrices", {"optimizer.kind": "muon", "model.freeze": ["layers"]},
        {"optimizer.kind": "adamw"}),
    check("train/optimizer.py:coded_matrices", {"optimizer.state": "8bit"}, {"optimizer.state": "fp32"}),
    check("model/quantize/layers.py:quantizable", {"model.quantize": "nf4", **RANDOM, **LORA},
        {"model.quantize": "none"}, change=family("gpt2")),
    dry("setup/resolve.py:check_fits", RANDOM, {**RANDOM, "model.config": {"vocab_size": 259}},
        change=config(vocab_size=100)),
    check("setup/check.py:_check_weights: write model.init", {}, RANDOM,
        change=lambda place: (place / "model/model.safetensors").unlink()),
    check("model/build.py:_require_complete", {}, RANDOM, words="train r.yaml", change=config(num_hidden_layers=3)),
    dry("train/evaluate.py:require_metric", {"data.eval": "rows.jsonl", "checkpoint.keep_best": "eval/loss/other"},
        {"checkpoint.keep_best": "eval/loss"}),
)  # fmt: skip
SCHEDULES = (
    check("train/schedule.py:schedule_flaws: \N{SECTION SIGN} \N{SECTION SIGN}", {"schedule.warmup": "9 steps"},
        {"schedule.warmup": "3%"}),
    check("train/schedule.py:schedule_flaws: \N{SECTION SIGN}, at",
          {"schedule.kind": "wsd_s", "schedule.decay": "1 steps", "schedule.periods": ["4 steps", "9 steps"],
          "train.duration": "9 steps", "schedule.warmup": "1 steps"}, {"schedule.min_lr_ratio": 0.1}),
)
ROUTED = {"model.router_aux_loss_coef": 0.1, **RANDOM}
EXPERTS = (
    check("model/adapted_experts.py:adapt_experts", {**RANDOM, **LORA, "adapter.experts": True,
        "adapter.modules_to_save": ["experts"]},
          {"adapter.modules_to_save": None}, {"adapter.experts": False}, change=family("mixtral"),
          reading={"leave it out of modules_to_save": "leave out adapter.modules_to_save"}),
    dry("setup/resolve.py:_check_tiles", {**ROUTED, "train.tiled_mlp": True, "model.config": {"vocab_size": 259}},
        {"train.tiled_mlp": False}, change=family("mixtral")),
    dry("setup/resolve.py:_compiled: write", {**RANDOM, "train.compile": True},
        {"train.compile": False}, change=config(model_type="jetmoe", kv_channels=8, num_key_value_heads=2)),
    dry("setup/resolve.py:_compiled: write", {**RANDOM, "train.compile": True, "parallel.expert": 2,
        "parallel.processes": 2, "parallel.shard": "full", "train.gradient_checkpointing": "full",
        "train.micro_batch_size": 1,
        "model.config": {"vocab_size": 259}}, {"train.compile": False},
        change=family("mixtral")),
    check("setup/check.py:_check_model_directory: export it first", {"model.name_or_path": "./runs/r", "name": "other"},
          {"$": ["export-hf runs/r"], "model.name_or_path": "runs/r/exports/step-2"}, start="run",
          reading={"and name the export": "and model.name_or_path: runs/r/exports/step-2"}),
)
DPO, PAIRS = {"method.kind": "dpo", "data.train": "pairs.jsonl"}, {"start": "model", "change": pairs}
MERGED = {RUN: ["export-hf runs/r"], "model.name_or_path": "runs/r/exports/step-2"}


def other_tokens(place: Path) -> None:
    """A teacher with tokens of its own."""
    from tuner.config.recipe import TokenizerSection
    from tuner.data.encoding.tokenizer_files import load_tokenizer

    section = TokenizerSection(name_or_path="byte", add_tokens=("<other>",))
    load_tokenizer(str(place / "model"), None, section).save(place / "t/step-1")
    path = place / "t/step-1/tokenizer.json"
    path.write_text(path.read_text().replace("<|eos|>", "<|end|>"))


def adapter(place: Path) -> None:
    """A directory of an adapter."""
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")


CHOICES = (
    check("setup/axes.py:_check_numbers", {"parallel.tensor": 3, "train.micro_batch_size": 1},
        {"parallel.tensor": 1}, {"parallel.tensor": 2}, {"parallel.tensor": 4},
        reading={"model: 1, 2, 4": "model: write parallel.tensor: 1, 2 or 4"}),
    check("setup/check.py:_check_model_directory: merge", {"model.name_or_path": "./adapter", "name": "other"}, MERGED,
        start="run", change=adapter, 
        reading={"RUN, and name the export": "runs/r and model.name_or_path: runs/r/exports/step-2"}),
    dry("setup/resolve.py:_reference", {**DPO, **LORA, "adapter.modules_to_save": ["norm"], "method.reference":
        "adapter_off"}, {"method.reference": "columns"}, **PAIRS),
    dry("setup/teacher.py:check_teacher", {"method.kind": "distill", "method.teacher": "./t/step-1"},
        {"tokenizer.name_or_path": "t/step-1"}, start="teacher", change=other_tokens,
        reading={"tokenizer: tokenizer.name_or_path": "tokenizer.name_or_path: t/step-1"}),
    dry("setup/timetable.py:few_steps", {"train.duration": "5 epochs", "train.global_batch_size": 8, 
        "data.packing": False, "logging.level": "warning"},
        {"train.global_batch_size": 4}, {"train.duration": "7 epochs"}),
    dry("setup/window_course.py:check_reference", {**DPO, "data.windows.files": 1, "schedule.kind": "constant",
        "schedule.warmup": "1 steps"}, {"adapter.kind": "lora", "method.reference": "adapter_off"},
        {"data.windows.files": None},
        reading={"train an adapter, with": "write adapter.kind: lora and",
        "remove data.windows": "remove data.windows.files"}, **PAIRS),
    check("setup/resolve.py:require_apart", {**RANDOM, "data.packing": True}, {"data.packing": "auto"},
        change=saved("bloom", n_layer=1, n_head=2)),
    dry("setup/resolve.py:rerouted", {**RANDOM, "train.compile": True}, {"train.compile": "auto"},
        change=saved("bloom", n_layer=1, n_head=2)),
)  # fmt: skip
CASES = (*CHOICES, *NUMERICS, *MODELS, *SCHEDULES, *EXPERTS)
