"""Configurations in the shapes of other tools' own, converted: what the recipe says, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.config.dump import flatten, recipe_dict
from tuner.config.imported import Imported, import_text
from tuner.config.load import RecipeText, load_recipe
from tuner.config.other_configs import dialects
from tuner.errors import RecipeError

AXOLOTL = """\
base_model: ./base
load_in_4bit: true
strict: false
datasets:
  - path: rows/chats.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from}
  - path: owner/set
    split: train[:5%]
    type: {field_instruction: question, field_output: answer}
val_set_size: 0.02
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2.0e-4
bf16: auto
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
flash_attention: true
special_tokens: {pad_token: "<|end|>"}
"""
FACTORY = """\
model_name_or_path: ./base
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: own,other
template: llama3
max_samples: 500
val_size: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
eval_strategy: steps
eval_steps: 200
quantization_bit: 4
ddp_timeout: 180000000
"""
TRL = """\
model_name_or_path: ./base
dataset_name: owner/chats
use_peft: false
lora_r: 8
max_steps: 100
num_train_epochs: 1
per_device_train_batch_size: 2
warmup_steps: 10
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
eval_strategy: epoch
bf16: true
max_length: 2048
early_stoping: 3
"""
TORCHTUNE = """\
output_dir: /out/run
model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_attn_modules: [q_proj, v_proj, output_proj], \
apply_lora_to_mlp: true, lora_rank: 8, lora_alpha: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /base/tokenizer.model, max_seq_len: 1024}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /base, model_type: LLAMA3}
dataset: {_component_: torchtune.datasets.chat_dataset, data_files: rows.json, conversation_column: talk, packed: true}
seed: null
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2e-5}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
max_steps_per_epoch: 50
gradient_accumulation_steps: 4
clip_grad_norm: null
compile: false
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
device: cpu
dtype: bf16
enable_activation_checkpointing: true
"""
STUDIO = """\
model: ./base
training: {training_type: LoRA, max_seq_length: 1024, learning_rate: 2e-4, num_epochs: 1, batch_size: 2,
  gradient_accumulation_steps: 4, random_state: 7, load_in_4bit: false}
lora: {lora_r: 8, lora_alpha: 16, target_modules: [q_proj, k_proj], use_rslora: true}
"""
SWIFT = json.dumps(
    {"model": "./base", "train_type": "dora", "dataset": ["owner/set#500", "own.jsonl"], "torch_dtype": "bfloat16",
     "target_modules": "all-linear", "max_length": 512, "truncation_strategy": "delete", "split_dataset_ratio": 0.01,
     "learning_rate": 1e-4, "num_train_epochs": 1, "freeze_vit": True, "dataloader_num_workers": 4}
)  # fmt: skip
EXPECTED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "axolotl": (
        AXOLOTL,
        {"adapter.kind": "lora", "adapter.r": 32, "adapter.target_modules": "all-linear", "data.eval": "2%",
         "model.quantize": "nf4", "optimizer.state": "8bit",
         "data.max_length": 4096, "data.packing": "auto", "train.global_batch_size": 8, "train.micro_batch_size": 2,
         "train.duration": "3 epochs", "optimizer.kind": "adamw", "optimizer.betas": [0.9, 0.999],
         "optimizer.lr": 2e-4, "schedule.kind": "cosine", "schedule.warmup": "10%", "eval.every": "0.25 epochs",
         "checkpoint.every": "1 epoch", "train.gradient_checkpointing": "full", "train.precision": "auto"},
        ("special_tokens",),
    ),
    "llama-factory": (
        FACTORY,
        {"model.quantize": "nf4",
         "adapter.kind": "lora", "adapter.r": 16, "adapter.alpha": 32, "adapter.target_modules": ["q_proj", "v_proj"],
         "data.eval": "10%", "data.packing": False, "data.max_length": 2048, "train.global_batch_size": 8,
         "train.duration": "2 epochs", "eval.every": "200 steps", "schedule.warmup": "never",
         "parallel.timeout": "30 min", "tokenizer.chat_template": "llama3"},
        ("dataset: own: not in data/dataset_info.json", "dataset: other: not in data/dataset_info.json"),
    ),
    "trl": (
        TRL,
        {"adapter.kind": "none", "train.duration": "100 steps", "train.global_batch_size": 2, "optimizer.lr": 2e-5,
         "schedule.kind": "cosine", "schedule.min_lr_ratio": 0.1, "schedule.warmup": "10 steps",
         "data.max_length": 2048, "train.precision": "bf16", "data.eval": None, "method.train_on": "all"},
        ("eval_strategy", "lora_r", "early_stoping: 3: has no counterpart"),
    ),
    "torchtune": (
        TORCHTUNE,
        {"model.name_or_path": "/base", "adapter.kind": "lora", "adapter.r": 8, "data.max_length": 1024,
         "adapter.target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
         "data.packing": "auto", "train.duration": "100 steps",
         "train.global_batch_size": 8, "train.micro_batch_size": 2,
         "optimizer.lr": 2e-5, "schedule.kind": "cosine", "schedule.warmup": "100 steps",
         "train.max_grad_norm": "never", "train.device": "cpu", "train.precision": "bf16",
         "train.gradient_checkpointing": "full",
         "output_dir": "/out/run"},
        (),
    ),
    "unsloth": (
        STUDIO,
        {"adapter.kind": "lora", "adapter.r": 8, "adapter.use_rslora": True, "seed": 7, "data.max_length": 1024,
         "train.global_batch_size": 8, "train.micro_batch_size": 2, "train.duration": "1 epoch",
         "optimizer.lr": 2e-4, "schedule.kind": "linear"},
        ("data.train: the file names no data set; put yours here",),
    ),
    "ms-swift": (
        SWIFT,
        {"adapter.kind": "dora", "adapter.r": 8, "data.max_length": 512, "data.too_long": "drop", "data.eval": "1%",
         "train.precision": "bf16", "train.duration": "1 epoch"},
        ("freeze_vit",),
    ),
}  # fmt: skip


def imported(tool: str, tmp_path: Path) -> Imported:
    return import_text(EXPECTED[tool][0], "config.yaml", directory=tmp_path)


@pytest.mark.parametrize("tool", EXPECTED)
def test_a_configuration_becomes_a_recipe(tool: str, tmp_path: Path) -> None:
    found = imported(tool, tmp_path)
    _, expected, left = EXPECTED[tool]
    assert found.tool == tool
    values = flatten(recipe_dict(found.recipe))
    assert {key: values[key] for key in expected} == expected
    assert len(found.left) == len(left), found.left
    for start in left:
        assert any(item.startswith(start) for item in found.left), (start, found.left)
        assert f"#   {start}" in found.text


@pytest.mark.parametrize("tool", EXPECTED)
def test_its_text_is_the_same_recipe_and_names_what_each_line_comes_from(tool: str, tmp_path: Path) -> None:
    found = imported(tool, tmp_path)
    (tmp_path / "import.yaml").write_text(found.text)
    again = load_recipe(tmp_path / "import.yaml", cwd=Path.cwd()).recipe
    assert again.train == found.recipe.train
    assert again.adapter == found.recipe.adapter
    assert found.text.startswith(f"# From {dialects()[found.tool].title}'s config.yaml, by tuner import.\n")
    assert "learning_rate\n" in found.text or tool in {"trl", "torchtune"}


_AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\ndatasets: [{path: r.jsonl, type: chat_template%s}]\n"
_TRL = "model_name_or_path: a/b\ndataset_name: o/s\n"
_FACTORY = "model_name_or_path: a/b\ndataset: own.json\ntemplate: llama3\ncutoff_len: 64\nfinetuning_type: lora\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (_AXOLOTL % "" + "chat_template: llama3", "  chat_template: llama3"),
        (_AXOLOTL % "" + "chat_template: phi_3", "  chat_template: phi3"),
        (_TRL + "assistant_only_loss: true", "  train_on: assistant"),
        (_TRL + "assistant_only_loss: true\ncompletion_only_loss: false", "  train_on: assistant"),
        (_TRL, "  train_on: all  # TRL's default"),
        (_TRL + "lr_scheduler_type: cosine_with_restarts", "  kind: cosine  # lr_scheduler_type"),
        (_TRL + "lr_scheduler_type: rex", "  kind: linear  # in place of lr_scheduler_type: rex"),
        (_TRL + "per_device_eval_batch_size: 4", "  micro_batch_size: 8  # TRL's default"),
        (_TRL + "gradient_accumulation_steps: 2", "# 8 rows per process x 2 accumulation steps x 1 process"),
        (_AXOLOTL % "" + "tensor_parallel_size: 2", "  tensor: 2  # tensor_parallel_size"),
        (_FACTORY + "stage: pt", "  packing: auto  # LLaMA-Factory's default of stage pt"),
        (_FACTORY + "stage: pt\npacking: false", "  packing: false  # packing"),
        (_FACTORY + "stage: sft", "  packing: false  # LLaMA-Factory's default"),
        (_FACTORY + "stage: sft\npacking: true\nneat_packing: false", "  packing: auto"),
        (_FACTORY + "stage: sft\nneat_packing: true\npacking: false", "  packing: auto"),
    ],
)
def test_a_key_becomes_a_line(text: str, line: str) -> None:
    written = [" ".join(each.split("  ")).split() for each in import_text(text, "c.yaml").text.splitlines()]
    assert any(" ".join(line.split()) in " ".join(words) for words in written), written


_TUNE = "checkpointer: {checkpoint_dir: /base}\nmodel: {_component_: torchtune.models.llama3.%s}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_AXOLOTL % "" + "adapter: lora\nload_in_8bit: true", {"model.quantize": "int8", "adapter.kind": "lora"}),
        (_AXOLOTL % "" + "optimizer: adamw_torch_8bit", {"optimizer.kind": "adamw", "optimizer.state": "8bit"}),
        (_AXOLOTL % "" + "tiled_mlp: true\ngradient_checkpointing: offload",
         {"train.tiled_mlp": True, "train.offload_activations": True, "train.gradient_checkpointing": "full"}),
        (_AXOLOTL % "" + "fp16: true\nbf16: false", {"train.precision": "fp16"}),
        (_AXOLOTL % "" + "fp8: true", {"train.precision": "fp8"}),
        (_TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\nbnb_4bit_compute_dtype: bfloat16",
         {"model.quantize": "nf4", "adapter.kind": "lora", "train.precision": "bf16"}),
        (_TRL + "activation_offloading: true", {"train.offload_activations": True}),
        (_TRL + "optim: paged_adamw_32bit", {"optimizer.kind": "adamw", "optimizer.offload": "host"}),
        ("model: ./base\ntrain_type: lora\nquant_bits: 4\nquant_method: bnb\ntorch_dtype: float16\n"
         "loss_scale: last_round",
         {"model.quantize": "nf4", "train.precision": "fp16", "method.train_on": "last_assistant"}),
        (_TUNE % "qlora_llama3_8b", {"model.quantize": "nf4", "adapter.kind": "lora"}),
        (_TUNE % "llama3_8b" + "enable_activation_offloading: true\nfsdp_cpu_offload: true",
         {"train.offload_activations": True, "optimizer.offload": "host", "adapter.kind": "none"}),
        (_TUNE % "llama3_8b" + "optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}",
         {"optimizer.kind": "adamw", "optimizer.state": "8bit", "optimizer.lr": 2e-5}),
        ("model: ./base\ntraining: {training_type: QLoRA, max_seq_length: 1024, random_state: 7}",
         {"model.quantize": "nf4", "adapter.kind": "lora"}),
    ],
)  # fmt: skip
def test_what_saves_memory_elsewhere_does_here(text: str, expected: dict[str, Any]) -> None:
    found = import_text(text, "c.yaml")
    values = flatten(recipe_dict(found.recipe))
    assert {key: values.get(key) for key in expected} == expected, found.left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (_TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_use_double_quant: true",
         "bnb_4bit_use_double_quant: true: not supported: scales of the quantised base that are quantised"),
        (_TRL + "load_in_4bit: true", "load_in_4bit (model.quantize: nf4): there is no adapter"),
        (_AXOLOTL % "" + "gptq: true", "gptq: true: not supported: bases quantised otherwise"),
        (_AXOLOTL % "" + "activation_offloading: disk", "activation_offloading: disk: not supported: weights in"),
        (_AXOLOTL % "" + "chat_template: gemma3", "chat_template: gemma3: no chat template has this name here"),
        (_AXOLOTL % "" + "chat_template: tokenizer_default_fallback_chatml", "chat_template: tokenizer_default_fall"),
        (_AXOLOTL % "" + "special_tokens: {eos_token: '</s>'}", "special_tokens: {eos_token:"),
        (_AXOLOTL % "" + "group_by_length: true", "group_by_length: true: not needed"),
        (_AXOLOTL % "" + "train_on_eos: none", "train_on_eos: none: not supported"),
        (_AXOLOTL % "" + "logging_steps: 1", "logging_steps: 1: every step is in metrics.jsonl"),
        (_AXOLOTL % ", train_on_eos: last", "datasets.0.train_on_eos: last: has no counterpart"),
        (_AXOLOTL % ", roles_to_train: [user]", "datasets.0.roles_to_train: [user]: has no counterpart"),
        (_AXOLOTL % "" + "loss_watchdog_threshold: 5.0", "loss_watchdog_threshold: 5.0: not supported"),
        (_TRL + "eos_token: <|im_end|>", "eos_token: \"<|im_end|>\": the tokenizer's own"),
        (_TUNE % "llama3_8b" + "dataset: {_component_: torchtune.datasets.alpaca_dataset}",
         'dataset._component_: "alpaca_dataset (it asks in a text of its own)": '),
        (_TUNE % "llama3_8b" + "dataset: {_component_: t.text_completion_dataset, source: text, data_files: c.txt}",
         'dataset.source: "text (a line is a document there, the file here)": '),
        (_TRL + "dataset_config: main", "dataset_config: main: not supported"),
        (_TRL + "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}",
         "lr_scheduler_kwargs: {num_cycles: 3}: "),
    ],
)  # fmt: skip
def test_what_has_an_effect_and_no_line_is_listed(text: str, left: str) -> None:
    found = import_text(text, "c.yaml")
    assert any(item.startswith(left) for item in found.left), found.left
    assert f"#   {left}" in found.text


@pytest.mark.parametrize("name", ["type", "formatting", "data_format", "data_files", "file_name", "column_map"])
@pytest.mark.parametrize("value", ["chatml", 0, [1], {"a": "b"}, [{"a": 1}]])
def test_a_key_of_a_data_set_that_stands_at_the_top_with_another_value_is_listed(name: str, value: Any) -> None:
    found = import_text(json.dumps({"model_name_or_path": "a/b", "dataset_name": "o/s", name: value}), "c.json")
    source = found.recipe.data.train[0]
    assert (source.format, dict(source.columns)) == ("auto", {})
    assert any(item.startswith(name) for item in found.left), found.left


def test_what_belongs_to_each_data_set_is_written_into_each() -> None:
    found = import_text(_TRL + "dataset_text_field: body\nmax_samples: 7\n", "c.yaml")
    (source,) = found.recipe.data.train
    assert (source.path, dict(source.columns), source.count) == ("o/s:train", {"text": "body"}, 7)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("type: sft", "sft"), ("type: dpo", "dpo"), ("type: causal", "pretrain"), ("trainer_type: TRL_DPO", "dpo")],
)
def test_a_word_for_the_whole_training_is_its_method(text: str, kind: str) -> None:
    assert import_text(f"model_name_or_path: a/b\ndataset_name: o/s\n{text}\n", "c.yaml").recipe.method.kind == kind


ANCHORS = """\
base_model: a/b
micro_batch_size: 1
set: &set {path: r.jsonl, type: alpaca, split: "train[:10]"}
datasets: [*set, {<<: *set, path: s.jsonl}]
learning_rate: &rate 3e-5
"""


def test_anchors_and_merged_mappings_of_other_tools_are_read() -> None:
    found = import_text(ANCHORS, "c.yaml")
    assert [(Path(source.path).name, source.format) for source in found.recipe.data.train] == [
        ("r.jsonl", "alpaca"), ("s.jsonl", "alpaca"),
    ]  # fmt: skip
    assert found.recipe.optimizer.lr == 3e-5


@pytest.mark.parametrize(
    "text",
    [
        "base_model: *later\nlater: &later a\n",
        "base_model: &own [*own]\n",
        "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)),
    ],
)
def test_aliases_that_stand_for_nothing_or_for_too_much_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="alias"):
        import_text(text, "c.yaml")


def test_a_recipe_itself_has_no_anchors() -> None:
    with pytest.raises(RecipeError, match="a recipe has no anchors"):
        load_recipe(RecipeText("model: {name_or_path: &name a/b}\ndata: {train: r.jsonl}\n"))


def test_a_project_of_a_tracker_turns_the_tracker_on() -> None:
    logging = import_text(_AXOLOTL % "" + "wandb_project: tea\n", "c.yaml").recipe.logging
    assert (logging.trackers, logging.project) == (("wandb",), "tea")
    logging = import_text(_AXOLOTL % "" + "wandb_project: tea\nuse_wandb: false\n", "c.yaml").recipe.logging
    assert logging.trackers == ()


PROGRAM = "from trl import SFTConfig, SFTTrainer\nSFTTrainer(model='a/b', args=SFTConfig(output_dir='o')).train()\n"


@pytest.mark.parametrize("name", ["train.py", "stdin"])
def test_a_program_is_answered_with_what_can_be_read(name: str) -> None:
    with pytest.raises(RecipeError, match="a Python program, which is not run here") as caught:
        import_text(PROGRAM, name)
    assert "tuner import args.yaml --from trl" in str(caught.value.hint)


def test_what_changes_nothing_is_not_listed() -> None:
    quiet = "max_steps: -1\nload_in_4bit: false\nlr_scheduler_type: cosine_with_restarts\n"
    found = import_text(f"{_TRL}{quiet}lr_scheduler_kwargs: {{num_cycles: 1}}\nassistant_only_loss: true", "c.yaml")
    assert found.left == ()
    assert import_text(_AXOLOTL % ", roles_to_train: [assistant], train_on_eos: turn", "c.yaml").left == ()
    found = import_text(_TRL, "c.yaml")
    assert found.left == () and "completion: method.train_on: assistant" in found.text


def test_sources_keep_their_form_their_columns_and_their_share(tmp_path: Path) -> None:
    chats, questions = imported("axolotl", tmp_path).recipe.data.train
    assert (Path(chats.path).name, chats.format) == ("chats.jsonl", "sharegpt")
    assert (questions.path, questions.format) == ("owner/set:train[:5%]", "prompt_completion")
    assert questions.columns == {"prompt": "question", "completion": "answer"}
    first, second = imported("ms-swift", tmp_path).recipe.data.train
    assert (first.path, first.count, Path(second.path).name) == ("owner/set:train", 500, "own.jsonl")
    assert imported("torchtune", tmp_path).recipe.data.train[0].columns == {"messages": "talk"}


@pytest.mark.parametrize(
    ("builder", "form", "columns", "kind"),
    [
        ("instruct_dataset, source: o/n", "alpaca", {"instruction": "input"}, "sft"),
        ("instruct_dataset, source: o/n, column_map: {input: ask, output: reply}", "alpaca",
         {"instruction": "ask", "output": "reply"}, "sft"),
        ("samsum_dataset", "alpaca", {"instruction": "dialogue", "output": "summary"}, "sft"),
        ("alpaca_dataset, column_map: {instruction: ask}", "alpaca", {"instruction": "ask"}, "sft"),
        ("text_completion_dataset, source: o/n, column: body", "text", {"text": "body"}, "pretrain"),
        ("wikitext_dataset", "text", {"text": "page"}, "pretrain"),
        ("chat_dataset, source: o/n, conversation_column: talk, conversation_style: sharegpt", "sharegpt",
         {"conversations": "talk"}, "sft"),
    ],
)  # fmt: skip
def test_a_builder_of_torchtune_names_the_form_and_the_columns(
    builder: str, form: str, columns: dict[str, str], kind: str
) -> None:
    text = f"checkpointer: {{checkpoint_dir: /base}}\ndataset: {{_component_: torchtune.datasets.{builder}}}\n"
    found = import_text(text, "c.yaml").recipe
    (source,) = found.data.train
    assert (source.format, dict(source.columns), found.method.kind) == (form, columns, kind)


def test_llama_factorys_table_of_data_sets_is_read(tmp_path: Path) -> None:
    listed = {
        "own": {"file_name": "own.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
        "other": {"hf_hub_url": "owner/other", "columns": {"prompt": "ask", "response": "say"}},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    own, other = imported("llama-factory", tmp_path).recipe.data.train
    assert (Path(own.path).name, own.format, own.columns, own.count) == (
        "own.json", "sharegpt", {"conversations": "talk"}, 500,
    )  # fmt: skip
    assert (other.path, other.format) == ("owner/other:train", "alpaca")
    assert other.columns == {"instruction": "ask", "output": "say"}


def test_the_batch_follows_from_the_processes(tmp_path: Path) -> None:
    assert import_text(FACTORY, "c.yaml", processes=4, directory=tmp_path).recipe.train.global_batch_size == 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base_model: a/b\nrl: grpo\n", "not supported: reinforcement learning"),
        ("model_name_or_path: a/b\nstage: ppo\n", "not supported: reinforcement learning"),
        ("loss: {_component_: torchtune.rlhf.loss.PPOLoss}\n", "not supported: reinforcement learning"),
        ("loss: {_component_: torchtune.rlhf.loss.SimPOLoss}\n", "not supported: preference losses other than"),
        ("some: thing\n", "of no tool that is known"),
        ("model: {name_or_path: a/b}\ndata: {train: x}\n", "is a recipe already"),
        ("base_model: [\n", "not YAML"),
    ],
)
def test_what_cannot_be_imported_is_refused(text: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        import_text(text, "c.yaml")


def test_a_configuration_that_is_taken_for_a_recipe_is_answered_with_import(tmp_path: Path) -> None:
    for tool in ("axolotl", "llama-factory", "torchtune"):
        (tmp_path / "c.yaml").write_text(EXPECTED[tool][0])
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / "c.yaml", cwd=tmp_path)
        hint = f"a configuration of {dialects()[imported(tool, tmp_path).tool].title}? convert it: tuner import c.yaml"
        assert caught.value.hint == f"{hint} > recipe.yaml"
    (tmp_path / "c.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\nlearning_rate: 1e-4\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "c.yaml", cwd=tmp_path)
    assert caught.value.hint is None


SCRIPT = """\
#!/bin/bash
# two cards
export MODEL=./base
NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model ${MODEL} \\
    --tuner_type full --learning_rate 2e-5 \\
    --dataset 'owner/first#500' \\
              own.jsonl \\
    --max_length=512 --packing true \\
    --output_dir "${OUT:-out}/run" 2>&1 | tee log.txt
swift infer --adapters out
"""
"""Variables, a default of one, values on several lines, `--key=value`, a pipe, and a command of another kind."""


def test_the_command_of_a_script_is_read() -> None:
    found = import_text(SCRIPT, "train.sh")
    assert found.tool == "ms-swift" and 'name_or_path: "./base" ' in found.text and "output_dir: out/run " in found.text
    own = flatten(recipe_dict(found.recipe))
    expected = {
        "adapter.kind": "none", "optimizer.lr": 2e-5, "data.max_length": 512, "data.packing": "auto",
        "train.micro_batch_size": 1, "train.global_batch_size": 16,
    }  # fmt: skip
    assert {key: own[key] for key in expected} == expected
    assert [Path(source.path).name for source in found.recipe.data.train] == ["first:train", "own.jsonl"]


@pytest.mark.parametrize(
    ("text", "tool", "line"),
    [
        ("trl sft --model_name_or_path a/b --dataset_name c/d --use_peft", "trl", "kind: lora"),
        ("accelerate launch --num_processes 4 scripts/sft.py --model_name_or_path a/b --dataset_name c/d "
         "--per_device_train_batch_size 2", "trl", "global_batch_size: 8"),
        ("torchrun --nproc_per_node=2 examples/sft.py --model_name_or_path a/b --dataset_name c/d --bf16",
         "trl", "precision: bf16"),
        ("torchrun --nproc_per_node=8 examples/sft.py --model_name_or_path a/b --dataset_name c/d "
         "--per_device_train_batch_size 2 --sequence_parallel_size 4", "trl", "2 groups of 4 processes"),
        ("torchrun --nproc_per_node=8 examples/sft.py --model_name_or_path a/b --dataset_name c/d "
         "--per_device_train_batch_size 2 --sequence_parallel_size 4", "trl", "global_batch_size: 4"),
        ("llamafactory-cli train --stage sft --model_name_or_path a/b --dataset own.json --cutoff_len 128",
         "llama-factory", "max_length: 128"),
        ("swift pt --model a/b --dataset c/d", "ms-swift", "kind: pretrain"),
    ],
)  # fmt: skip
def test_a_command_line_is_a_configuration(text: str, tool: str, line: str) -> None:
    found = import_text(text, "stdin")
    assert found.tool == tool and line in found.text


def test_a_commands_flags_come_on_top_of_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-4\n")
    found = import_text("trl sft --config own.yaml --learning_rate 3e-4\n", "run.sh", directory=tmp_path)
    assert (found.recipe.optimizer.lr, found.recipe.model.name_or_path) == (3e-4, "a/b")
    with pytest.raises(RecipeError, match=r"gone\.yaml: the file that the command reads: No such file"):
        import_text("trl sft --config gone.yaml\n", "run.sh", directory=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl grpo --model_name_or_path a/b\n", "trl grpo: grpo: not supported: reinforcement learning"),
        ("swift rlhf --rlhf_type grpo --model a/b\n", "rlhf_type: grpo: not supported: reinforcement learning"),
        ("python examples/ppo.py --model_name_or_path a/b\n", "stage: ppo: not supported: reinforcement learning"),
        ("echo nothing\n", "no training command of a tool that is known"),
    ],
)
def test_a_script_without_a_training_that_is_here_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        import_text(text, "run.sh")


def test_a_mixture_of_trl_names_its_data_sets_and_what_is_lost() -> None:
    text = """\
model_name_or_path: a/b
dataset_mixture:
  datasets:
    - {id: c/d, config: default, split: train_sft, columns: [messages], weight: 1.0}
    - {id: e/f, split: train, weight: 0.5}
  test_split_size: 1000
  seed: 0
chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
assistant_only_loss: true
"""
    found = import_text(text, "mixture.yaml")
    assert [source.path for source in found.recipe.data.train] == ["c/d:train_sft", "e/f:train"]
    left = {item.partition(": ")[0] for item in found.left}
    assert left == {"chat_template", "dataset_mixture.datasets.1.weight", "dataset_mixture.test_split_size"}
