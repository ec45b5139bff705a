"""Rules between keys of a recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import RUN, Way

HELD_OUT: Way = {"data.eval": "2%"}
LORA = {"adapter.kind": "lora"}
FULL = {"adapter.kind": "none"}
QUANTIZED = {"model.quantize": "nf4", **LORA}
MOE = {"parallel.expert": 2}
SPLIT = {"parallel.tensor": 2}
DPO = {"method.kind": "dpo"}
DISTILL = {"method.kind": "distill", "method.teacher": "owner/teacher"}
WINDOWS = {"data.windows.files": 1}
CONSTANT = {"schedule.kind": "constant", "schedule.warmup": "2 steps"}
OPEN_END = {"train.duration": None, **WINDOWS}
LADDER = {"ladder.sizes": ["1M", "2M"], "model.init": "random", "train.duration": None,
    "train.global_batch_size": None, "data.eval": "rows.jsonl"}


def two_windows(directory: Path) -> None:
    """The files of windows a and b."""
    for name in "ab":
        shutil.copy(directory / "rows.jsonl", directory / f"rows{name}.jsonl")


def files(**texts: str) -> Change:
    """Write files, by what their names begin with; the rest is after two underscores."""

    def change(directory: Path) -> None:
        for name, text in texts.items():
            (directory / name.replace("__", ".")).write_text(text)

    return change


def rule(function: str, recipe: dict[str, Any], *meant: Way, said: str = "", **more: Any) -> Case:
    """A rule of `config/rules.py`: the keys that break it, and the ways out."""
    return Case(f"config/rules.py:{function}: {said}", recipe, meant, **more)


def window(function: str, recipe: dict[str, Any], *meant: Way, said: str = "", **more: Any) -> Case:
    """A rule of `config/window_rules.py`."""
    return Case(f"config/window_rules.py:{function}: {said}", WINDOWS | recipe, meant, **more)


OF_MEASURING = (
    rule("_cadence_needs_rows", {"eval.every": "2 steps"}, HELD_OUT, {"eval.every": "never"}),
    rule("_best_needs_rows", {"checkpoint.keep_best": "eval/loss"}, HELD_OUT, {"checkpoint.keep_best": None},
        said="needs held"),
    rule(
        "_best_needs_rows", {"checkpoint.keep_best": "eval/loss", "eval.every": "never", "eval.at_end": False,
        **HELD_OUT},
        {"eval.every": "10%"}, {"checkpoint.keep_best": None}, said="needs eval",
    ),
    rule("_best_is_measured", {"checkpoint.keep_best": "eval/bleu", **HELD_OUT}, {"checkpoint.keep_best": "eval/loss"}),
    rule("_best_is_measured", {"checkpoint.keep_best": "eval/margin", **HELD_OUT},
        {"checkpoint.keep_best": "eval/loss"}),
    rule(
        "_patience_needs_rows", {"eval.patience": 3}, HELD_OUT, {"eval.patience": None},
        reading={" keep_best: eval/TASK/acc, or": ""},
    ),
    rule("_min_steps_bounds_something", {"train.min_steps": 2, **HELD_OUT}, {"eval.patience": 3},
        {"train.min_steps": None}),
    rule(
        "_evaluated_averages_are_there", {"ema.evaluate": True, **HELD_OUT},
        {"ema.decay": 0.999}, {"ema.evaluate": False}, said="there is no",
    ),
    rule("_evaluated_averages_are_there", {"ema.evaluate": True, "ema.decay": 0.9}, HELD_OUT, {"ema.evaluate": False},
        said="needs"),
    rule("_marks_need_rows", {"eval.marks": ["1 steps"]}, HELD_OUT, {"eval.marks": None}),
    rule(
        "_profile_records_something", {"profile.steps": [1], "profile.memory": False, "profile.time": False},
        {"profile.memory": True}, {"profile.time": True}, reading={"profile.memory or": "profile.memory: true or"},
    ),
    rule("_slow_rank_is_measured", {"health.slow_rank": 1.9}, {"health.times_every": "20 steps"},
        {"health.slow_rank": None}),
    rule(
        "_probed_layers_are_not_compiled",
        {"prober.steps": [1], "prober.modules": ["embed_tokens"], "train.compile": True},
        {"train.compile": False}, {"prober": None},
    ),
)  # fmt: skip
OF_MODELS = (
    rule("_config_needs_random", {"model.config": {"hidden_size": 64}}, {"model.init": "random"}),
    rule("_freeze_needs_full", {"model.freeze": ["norm"], **LORA}, {"model.freeze": None}, FULL),
    rule(
        "_quantized_is_frozen", {"model.quantize": "nf4"},
        LORA, {"adapter.kind": "dora"}, {"model.quantize": "none"},
    ),
    rule("_quantized_products_are_their_own", {"train.precision": "fp8", **QUANTIZED}, {"train.precision": "bf16"},
        {"model.quantize": "none"}),
    rule("_offload_needs_recompute", {"train.offload_activations": True}, {"train.gradient_checkpointing": "full"}),
    rule("_compiled_rows_are_packed", {"train.compile": True, "data.packing": False}, {"data.packing": "auto"},
        {"train.compile": "auto"}),
    rule(
        "_pretrain_takes_text", {"method.kind": "pretrain", "data.train": [{"path": "rows.jsonl", "format": "alpaca"}]},
        {"data.train": [{"path": "rows.jsonl", "format": "text"}]}, {"method.kind": "sft"},
        reading={"format: text": "data.train: [{path: rows.jsonl, format: text}]"},
    ),
    rule(
        "_pretrain_has_no_turns", {"method.kind": "pretrain", "tokenizer.chat_template": "chatml"},
        {"tokenizer.chat_template": None}, {"method.kind": "sft"}, reading={"the template": "tokenizer.chat_template"},
    ),
    rule(
        "_compared_answers_are_chats_or_texts", {**DPO, "data.train": [{"path": "rows.jsonl", "format": "text"}]},
        {"data.train": [{"path": "rows.jsonl", "format": "auto"}]},
        reading={"format: auto": "data.train: [{path: rows.jsonl, format: auto}]"},
    ),
    rule("_compared_answers_are_whole", {**DPO, "data.too_long": "split"}, {"data.too_long": "drop"},
        {"data.too_long": "truncate"}),
    rule("_adapted_experts_have_plain_lora", {"adapter.kind": "dora", "adapter.experts": True}, LORA,
        {"adapter.experts": False}),
    rule(
        "_adapted_experts_are_whole", {**LORA, "adapter.experts": True, **SPLIT},
        {"parallel.tensor": None, "parallel.expert": 2}, {"adapter.experts": False},
        reading={"leave it out for parallel.expert": "leave out parallel.tensor for parallel.expert: 2"},
    ),
)  # fmt: skip
OF_OPTIMIZERS = (
    rule(
        "_lr_of_its_own", {"optimizer.kind": "muon", "optimizer.adjust_lr": "original"},
        {"optimizer.lr": 0.02, "optimizer.adamw_lr": 3e-4}, said="original",
    ),
    rule("_lr_of_its_own", {"optimizer.kind": "adafactor", "optimizer.scale_parameter": True}, {"optimizer.lr": 1e-3},
        said="a learning"),
    rule(
        "_nesterov_has_momentum", {"optimizer.kind": "sgd", "optimizer.lr": 0.1, "optimizer.nesterov": True,
        "optimizer.momentum": 0},
        {"optimizer.momentum": 0.9}, {"optimizer.nesterov": False}, reading={"momentum above 0": "momentum: 0.9"},
    ),
    rule("_stochastic_rounding_needs_bf16", {"optimizer.rounding": "stochastic", **LORA},
        {"optimizer.rounding": "nearest"}, said="an adapter"),
    rule(
        "_stochastic_rounding_needs_bf16", {"optimizer.rounding": "stochastic", "train.precision": "bf16"},
        {"model.dtype": "bf16"}, {"optimizer.rounding": "nearest"}, said="rounds",
    ),
    rule(
        "_states_on_host_are_fp32", {"optimizer.offload": "host", "optimizer.state": "8bit"},
        {"optimizer.state": "fp32"}, {"optimizer.offload": "none"}, said="moments",
    ),
    rule(
        "_states_on_host_are_fp32",
        {"optimizer.offload": "host", "optimizer.rounding": "stochastic", "model.dtype": "bf16",
        "train.precision": "bf16"},
        {"optimizer.rounding": "nearest", "model.dtype": "auto"}, said="the host",
    ),
    rule("_rows_are_trained_in_full", {"optimizer.rows": ["embed_tokens"], **LORA}, {"optimizer.rows": None}, FULL),
    rule(
        "_rows_are_fp32_on_the_device", {"optimizer.rows": ["embed_tokens"], "optimizer.offload": "host"},
        {"optimizer.offload": "none"}, {"optimizer.rows": None}, said="rows are updated on",
    ),
    rule(
        "_rows_are_fp32_on_the_device",
        {"optimizer.rows": ["embed_tokens"], "optimizer.rounding": "stochastic", "model.dtype": "bf16",
        "train.precision": "bf16"},
        {"optimizer.rounding": "nearest", "model.dtype": "auto"}, {"optimizer.rows": None}, said="rows are updated in",
    ),
    rule("_rows_are_of_whole_embeddings", {"optimizer.rows": ["embed_tokens"], **SPLIT}, {"optimizer.rows": None},
        {"parallel.tensor": 1}),
)  # fmt: skip
OF_EXPORTS = (
    rule("_export_needs_checkpoint", {"checkpoint.at_end": False, "export.at_end": True}, {"checkpoint.at_end": True}),
    rule(
        "_kept_adapter_is_there", {"export.adapter": "keep"}, LORA, {"export.adapter": "merge"},
        reading={"set adapter.kind,": "set adapter.kind: lora,"},
    ),
    rule(
        "_base_is_a_choice", {"export.base": "quantized", **LORA}, {"model.quantize": "nf4"}, {"export.base": "auto"},
        said="the base", reading={"set model.quantize,": "set model.quantize: nf4,"},
    ),
    rule(
        "_base_is_a_choice", {"export.base": "quantized", "export.adapter": "keep", **QUANTIZED},
        {"export.adapter": "merge"}, {"export.base": "auto"}, said="a kept",
    ),
)  # fmt: skip
OF_MESHES = (
    rule(
        "_parts_are_sharded", {**SPLIT, "parallel.shard": "none"},
        {"parallel.shard": "full"}, {"parallel.shard": "hybrid"}, {"parallel.shard": "auto"},
    ),
    rule("_experts_elsewhere_take_rows_at_once", {"train.tiled_mlp": True, **MOE}, {"train.tiled_mlp": False}),
    rule("_split_layers_are_plain", {**SPLIT, **QUANTIZED}, {"model.quantize": "none"}, {"parallel.tensor": 1},
        said="\N{SECTION SIGN} not quantised"),
    rule("_split_layers_are_plain", {**SPLIT, "train.precision": "fp8"}, {"train.precision": "bf16"},
        {"parallel.tensor": 1}, said="\N{SECTION SIGN} not multiplied"),
    rule("_split_layers_are_plain", {**SPLIT, "train.tiled_mlp": True}, {"train.tiled_mlp": False},
        said="\N{SECTION SIGN} not computed"),
    rule("_losses_have_the_whole_vocabulary", {**SPLIT, **DISTILL}, {"parallel.tensor": 1}),
)  # fmt: skip
OF_WINDOWS = (
    window("grown_are_counted", {"data.windows.files": None, "data.windows.grow": True, **CONSTANT},
        {"data.windows.files": 1}),
    window(
        "skipped_have_names", {"data.windows.late": "skip", "data.train": "rows{window}.jsonl", **CONSTANT},
        {"data.windows.names": ["a", "b"], "data.windows.files": None}, {"data.windows.late": "stop"},
        change=two_windows,
            reading={"data.windows.names for files": "data.windows.names: [a, b] and data.windows.files: null"},
    ),
    window("keys_need_windows", {"data.windows.files": None, "data.windows.wait": "2 minutes", **CONSTANT},
        {"data.windows.files": 1},
           reading={", or names: [...]": ""}),
    window(
        "schedule_without_an_end", {**OPEN_END, "schedule.kind": "cosine"},
        {"train.duration": "1000 steps"}, {"schedule": {"kind": "constant", "warmup": "100 steps"}},
    ),
    window(
        "warmup_without_an_end", {**OPEN_END, "schedule.kind": "constant", "schedule.warmup": "3%"},
        {"schedule.warmup": "100 steps"}, {"train.duration": "1000 steps"},
    ),
    window(
        "columns_of_the_first_model", {**DPO, **LORA, **CONSTANT, "method.reference": "columns"},
        {"method.reference": "adapter_off"}, said="a reference",
    ),
    window("columns_of_the_first_model", {**DISTILL, **CONSTANT, "method.top_k": 8}, {"method.top_k": None},
        said="a teacher"),
)  # fmt: skip
OF_METHODS = (
    Case("config/methods.py:DistillMethod._has_one_teacher", {**DISTILL, "method.teacher": "./t",
        "method.teacher_every": "2 steps", "method.top_k": 8}, ({"method.top_k": None},), start="teacher"),
    Case("config/methods.py:DistillMethod._is_finite", {**DISTILL, "method.beta": 1, "method.top_k": 8,
        "method.tail": "renormalise"}, ({"method.tail": "rest"},)),
    Case(
        "config/methods.py:DpoMethod._has_what_its_loss_takes: loss \N{SECTION SIGN} has no label",
        {**DPO, "method.loss": "ipo", "method.label_smoothing": 0.1}, ({"method.loss": "sigmoid"},
        {"method.loss": "robust"}),
        reading={"write it with": "write method.loss:"},
    ),
    Case(
        "config/methods.py:DpoMethod._has_what_its_loss_takes: loss \N{SECTION SIGN} has no margin",
        {**DPO, "method.loss": "ipo", "method.margin": "rows"}, ({"method.loss": "sigmoid"}, {"method.loss": "hinge"}),
        reading={"write it with": "write method.loss:"},
    ),
    Case(
        "config/methods.py:DpoMethod._has_what_its_loss_takes: loss robust", {**DPO, "method.loss": "robust"},
        ({"method.label_smoothing": 0.1},),
    ),
)  # fmt: skip
OF_LADDERS = (
    Case("config/ladder_rules.py:starts_at_random", {**LADDER, "model.init": "pretrained"}, ({"model.init": "random"},
        )),
    Case("config/ladder_rules.py:trains_whole_models", {**LADDER, **LORA}, (FULL,)),
    Case("config/ladder_rules.py:compares_held_out_rows", {**LADDER, "data.eval": None}, (HELD_OUT,)),
    Case(
        "config/ladder_rules.py:rules_alone", {**LADDER, "optimizer.lr": 3e-4},
        ({"optimizer.lr": None}, {"ladder.lr": "recipe"}), reading={"remove it": "remove optimizer.lr"},
    ),
)  # fmt: skip
OF_VALUES = (
    Case("config/check.py:_unknown: not with kind", {"schedule.kind": "constant", "schedule.min_lr_ratio": 0.1},
        ({"schedule.kind": "cosine"}, {"schedule.kind": "linear"}, {"schedule.kind": "wsd"})),
    Case("config/check.py:_not_a_mapping: got \N{SECTION SIGN}; write model", {"model": "owner/name",
        "model.name_or_path": None}, ({"model": {"name_or_path": "owner/name"}},)),
    Case("config/check.py:_not_a_mapping: ; write", {"optimizer": "muon"}, ({"optimizer": {"kind": "muon"}},)),
    Case("config/duration.py:bare_number", {"train.duration": 500}, ({"train.duration": "500 steps"},
        {"train.duration": "500 epochs"}, {"train.duration": "500 tokens"})),
    Case("config/duration.py:Cadence.read", {**HELD_OUT, "eval.every": []}, ({"eval.every": "never"},)),
    Case("config/duration.py:Steps.read", {"train.steps_to_skip": "9-5"}, ({"train.steps_to_skip": ["5-9"]},),
        reading={"write the first step before the last: 5-9": "write train.steps_to_skip: [5-9]"}),
    Case("config/recipe.py:_no_other_word", {**LORA, "adapter.target_modules": ["all"]},
        ({"adapter.target_modules": "all-linear"},)),
    Case("config/value_types.py:Several._alone", {"model.freeze": "norm,embed_tokens"}, ({"model.freeze": ["norm",
        "embed_tokens"]},), reading={"write a list:": "write model.freeze:"}),
)  # fmt: skip
NAMED = {"data.windows.files": None, "data.windows.names": ["a", "b"], **CONSTANT}
GROUP, OWN = {"match": ["norm"]}, {"optimizer.kind": "custom", "optimizer.use": "sgd.py:build", "optimizer.lr": 1e-3}
OTHER_TOOL = """
base_model: owner/name
datasets: [{path: rows.jsonl, type: alpaca}]
adapter: lora
lora_r: 8
micro_batch_size: 2
num_epochs: 1
sequence_len: 64
"""
CHECK_OTHER = "config check other.yaml"
WRITTEN_OUT = {"write the value out,": "mv out.yaml other.yaml;"}
PLAIN = """
model: {name_or_path: owner/name}
data: {train: rows.jsonl}
train: {duration: 2 steps, stop_after: 2 steps}
"""
OF_FILES = (
    Case("config/yaml.py:_Builder._checked: alias", {}, ({RUN: ["mv out.yaml other.yaml"]},), CHECK_OTHER,
        change=files(out__yaml=PLAIN, other__yaml=PLAIN.replace("stop_after: 2 steps", "stop_after: *length")),
        reading=WRITTEN_OUT),
    Case("config/yaml.py:_Builder._checked: anchor", {}, ({RUN: ["mv out.yaml other.yaml"]},), CHECK_OTHER,
        change=files(out__yaml=PLAIN, other__yaml=PLAIN.replace("n: 2 steps", "n: &length 2 steps")),
        reading=WRITTEN_OUT),
    Case("config/load.py:_of_other_tool", {}, ({RUN: ["import other.yaml > r.yaml"]},), CHECK_OTHER,
        change=files(other__yaml=OTHER_TOOL), reading={"recipe.yaml": "r.yaml"}, instead=True),
    Case("config/load.py:_locate: see", {}, ({RUN: ["recipes list", "init --help"]},), CHECK_OTHER, instead=True),
    Case("config/overrides.py:merge: needs", {}, ({"--optimizer.lr": "1e-3"},), "config check r.yaml --optimizer.lr",
        reading={"VALUE": "1e-3"}),
    Case("config/overrides.py:merge: duplicate", {}, ({"--optimizer.lr": None},),
        "config check r.yaml --optimizer.lr 1e-3 --optimizer.lr 1e-3",
        reading={"write it once": "leave out --optimizer.lr"}),
    Case("config/overrides.py:unknown", {}, ({"--model": None, "--model.name_or_path": "owner/name"},),
        "config check r.yaml --model owner/name", reading={"a section; write": "leave out --model and write"}),
)
OF_LISTS = (
    Case("config/optimizers.py:ParameterGroup._sets_something", {"optimizer.groups": [GROUP]},
        ({"optimizer.groups": [{**GROUP, "lr": 1e-4}]}, {"optimizer.groups": [{**GROUP, "weight_decay": 0.1}]}),
        reading={"write one of them": "write groups: [{match: [norm], lr: 1e-4}], or "
            "groups: [{match: [norm], weight_decay: 0.1}]"}),
    Case("config/optimizers.py:CustomOptimizer._has_one_place_for_each", {**OWN, "optimizer.options":
        {"weight_decay": 0.1}}, ({"optimizer.options": None, "optimizer.weight_decay": 0.1},),
        change=files(sgd__py="import torch\ndef build(groups, lr):\n    return torch.optim.SGD(groups, lr)\n"),
        reading={"write optimizer.weight_decay,": "leave out optimizer.options and write optimizer.weight_decay: 0.1"}),
    window("names_have_a_place", NAMED, {"data.train": ["rows{window}.jsonl"]}, change=two_windows,
        reading={"write the source as logs/": "write data.train: ['rows", "{window}.jsonl": "{window}.jsonl']"}),
    window("_cadence_in", {**CONSTANT, "checkpoint.marks": ["1 epochs"]}, {"checkpoint.marks": ["9 steps"]},
        {"checkpoint.marks": ["9 tokens"]}, said="\N{SECTION SIGN}: got \N{SECTION SIGN};",
        reading={"write steps or tokens": "write checkpoint.marks: [9 steps] or checkpoint.marks: [9 tokens]"}),
    window("_cadence_in", {**CONSTANT, **OPEN_END, "checkpoint.every": "10%"}, {"checkpoint.every": "9 steps"},
        {"checkpoint.every": "9 tokens"}, said="\N{SECTION SIGN}: got \N{SECTION SIGN} of",
        reading={"write steps or tokens": "write checkpoint.every: 9 steps or 9 tokens"}),
    Case("config/ladder.py:LadderSize._one_way", {**LADDER, "ladder.sizes": [{"name": "a"}]},
        ({"ladder.sizes": ["190M"]}, {"ladder.sizes": [{"name": "a", "config": {"hidden_size": 512}}]}),
        reading={"either parameters, such as 190M, or config, such as {hidden_size: 512}":
            "sizes: [190M], or sizes: [{name: a, config: {hidden_size: 512}}]"}),
)  # fmt: skip
CASES = (
    *OF_FILES, *OF_LISTS,
    *OF_MEASURING, *OF_MODELS, *OF_OPTIMIZERS, *OF_EXPORTS, *OF_MESHES, *OF_WINDOWS, *OF_METHODS, *OF_LADDERS,
        *OF_VALUES,
)  # fmt: skip
