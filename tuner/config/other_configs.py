"""Whole configurations of other tools: whose one is, what a tool takes where nothing is written, and its own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tuner.config.not_supported import absent
from tuner.config.other_data import located, plain_sources, registered
from tuner.config.other_keys import attention_modules, metric_logger
from tuner.config.other_memory import ADAMW_VALUES, adapter
from tuner.config.other_methods import kd_loss, teacher
from tuner.config.other_parts import builder, chat_template, data_sets, text_of
from tuner.config.other_rules import Given, Lines, Rule, all_unless, micro_batch, note, number, switch, words
from tuner.config.other_values import of_value

Tool = Literal["axolotl", "llama-factory", "trl", "torchtune", "ms-swift", "unsloth"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
_HF: Lines = {"optimizer.betas": [0.9, 0.999], "schedule.warmup": "never"}


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Dialect:
    """One tool: keys that only it has, its defaults in our words where they differ from ours, and its own meanings."""

    title: str
    marks: frozenset[str]
    defaults: Lines = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    """Keys that say nothing about the training."""


def _axolotl_optimizer(value: Any, given: Given) -> Lines | str | None:
    known = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adafactor", "sgd", "muon"}
    if value in known:
        return {"optimizer.kind": "adamw" if str(value).startswith("adamw") else value}
    if found := ADAMW_VALUES.get(str(value)):
        return {**found}
    return of_value("optimizer.kind", value)


def _one_label(value: Any, given: Given) -> Lines | str | None:
    """A reward model's head has one score."""
    feature = absent("num_labels")
    assert feature is not None
    return {} if value == 1 and given.get("reward_model") is True else feature.sentence


def _axolotl_adapter(value: Any, given: Given) -> Lines | str | None:
    return adapter(value) or of_value("adapter.kind", value)


def _registered(value: Any, given: Given) -> Lines | str | None:
    """LLaMA-Factory's names of data sets, looked up in `dataset_info.json` where it was read."""
    info, directory = given.get("dataset_info"), str(given.get("dataset_dir") or "data")
    names = [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value or [])]
    found: list[Any] = [registered(name, info if isinstance(info, Mapping) else {}, directory) for name in names]
    counted = number(given.get("max_samples"))
    if counted:
        found = [{**({"path": item} if isinstance(item, str) else item), "count": int(counted)} for item in found]
    return {"data.train": found}


def _registered_held_out(value: Any, given: Given) -> Lines | str | None:
    found = _registered(value, {**given, "max_samples": None})
    return {"data.eval": found["data.train"]} if isinstance(found, dict) else found


def _tuner_model(value: Any, given: Given) -> Lines | str | None:
    """A builder of torchtune's models: which adapter it has."""
    name = str(value).rpartition(".")[2]
    found = adapter(name.partition("_")[0])
    if found is None:
        return {"adapter.kind": "none"}
    return found | ({"adapter.kind": "dora"} if given.get("model.use_dora") is True else {})


def _swift_sets(value: Any, given: Given) -> Lines | str | None:
    sources = plain_sources(value.split() if isinstance(value, str) else value)
    return None if sources is None else {"data.train": sources}


def _swift_held_out(value: Any, given: Given) -> Lines | str | None:
    sources = plain_sources(value.split() if isinstance(value, str) else value)
    return None if sources is None else {"data.eval": sources}


def _tuner_kind(value: Any, given: Given) -> Lines | str | None:
    kind = "qlora" if "qlora" in str(value).lower() else "lora"
    return adapter(kind) if "lora" in str(value).lower() else {"adapter.kind": "none"}


def _nothing(value: Any, given: Given) -> Lines | str | None:
    return {}


def _output_layer(value: Any, given: Given) -> Lines | str | None:
    """torchtune's switch for an adapter of the output layer."""
    return "write lm_head in adapter.target_modules" if value is True else {}


def _test_split(value: Any, given: Given) -> Lines | str | None:
    """TRL's split of the data set that is held out, where it evaluates at all."""
    name = given.get("dataset_name")
    if not isinstance(name, str) or str(given.get("eval_strategy", "no")).lower() in {"no", "false"}:
        return {}
    return {"data.eval": [located(name, value)]}


_SPECIAL_TOKENS = note(
    "the tokenizer's own special tokens are used, and padding is masked; new ones: "
    "tokenizer.add_tokens: [{token: TEXT, special: true}]"
)
_SYSTEM = note("a system prompt goes into the records, or into a template of your own: tokenizer.chat_template")
_TEMPLATE_OF_TORCHTUNE = note("write tokenizer.chat_template: NAME or FILE.jinja; null takes the tokenizer's own")
_LOSS_SCALES = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
_TRL_LOSS = all_unless("assistant_only_loss", "completion_only_loss")
DIALECTS: dict[Tool, Dialect] = {
    "axolotl": Dialect(
        "axolotl",
        frozenset(
            [
                "base_model",
                "sequence_len",
                "micro_batch_size",
                "sample_packing",
                "val_set_size",
                "datasets",
                "evals_per_epoch",
                "saves_per_epoch",
                "lora_target_linear",
                "train_on_inputs",
                "dataset_prepared_path",
                "special_tokens",
                "tokenizer_type",
                "model_type",
                "strict",
                "pad_to_sequence_len",
                "load_in_8bit",
                "wandb_entity",
                "wandb_watch",
                "loss_watchdog_threshold",
            ]
        ),
        _HF | {"data.packing": False, "train.duration": "1 epoch"},
        {
            "optimizer": _axolotl_optimizer,
            "adapter": _axolotl_adapter,
            "micro_batch_size": micro_batch,
            "chat_template": chat_template,
            "chat_template_jinja": note("write it to a file, and tokenizer.chat_template: FILE.jinja"),
            "special_tokens": _SPECIAL_TOKENS,
            "loss_watchdog_threshold": note("not supported: a loss at which a run ends; instead train.skip_spikes"),
            "wandb_name": text_of("name"),
            "num_labels": _one_label,
            "cosine_constant_lr_ratio": note("not supported: a part of the cosine at a constant rate"),
        },
        _keys("strict model_type tokenizer_type debug torchdistx_path save_first_step dataset_prepared_path"),
    ),
    "llama-factory": Dialect(
        "LLaMA-Factory",
        _keys(
            "stage finetuning_type cutoff_len template dataset_dir plot_loss lora_target quantization_bit "
            "preprocessing_num_workers overwrite_cache max_samples val_size visual_inputs pref_beta "
            "enable_thinking"
        ),
        _HF
        | {
            "adapter.kind": "lora",
            "adapter.r": 8,
            "adapter.alpha": 16,
            "schedule.kind": "linear",
            "data.packing": False,
            "data.max_length": 2048,
            "data.too_long": "truncate",
            "optimizer.lr": 5e-5,
            "train.duration": "3 epochs",
            "train.micro_batch_size": 8,
        },
        {
            "dataset": _registered,
            "eval_dataset": _registered_held_out,
            "max_samples": _nothing,
            "template": chat_template,
            "freeze_trainable_layers": note("not supported: freezing by a number of layers; instead model.freeze"),
        },
        _keys("dataset_dir do_eval dataset_info"),
    ),
    "trl": Dialect(
        "TRL",
        _keys(
            "dataset_name model_name_or_path use_peft lora_target_modules dataset_train_split "
            "per_device_train_batch_size assistant_only_loss completion_only_loss dataset_text_field "
            "max_seq_length attn_implementation dataset_test_split bnb_4bit_quant_type dataset_num_proc"
        ),
        _HF
        | {
            "schedule.kind": "linear",
            "method.train_on": "all",
            "optimizer.lr": 2e-5,
            "train.duration": "3 epochs",
            "data.packing": False,
            "data.max_length": 1024,
            "data.too_long": "truncate",
            "train.micro_batch_size": 8,
        },
        {
            "dataset_test_split": _test_split,
            "assistant_only_loss": _TRL_LOSS,
            "completion_only_loss": _TRL_LOSS,
            "eos_token": _SPECIAL_TOKENS,
            "pad_token": note("padding is masked here, whatever its token"),
            "dataset_config": note("not supported: one of a data set's configurations; instead a path of its files"),
            "chat_template_path": text_of("tokenizer.chat_template"),
            "chat_template": chat_template,
            "test_split_size": note("write data.eval: a share of the rows, such as 1%"),
        },
        _keys("dataset_train_split dataset_mixture.seed"),
    ),
    "torchtune": Dialect(
        "torchtune",
        _keys(
            "_component_ checkpointer metric_logger enable_activation_checkpointing max_steps_per_epoch "
            "log_peak_memory_stats save_adapter_weights_only"
        ),
        {
            "optimizer.betas": [0.9, 0.999],
            "schedule.kind": "constant",
            "schedule.warmup": "never",
            "train.max_grad_norm": "never",
            "data.packing": False,
            "data.too_long": "truncate",
        },
        {
            "batch_size": micro_batch,
            "checkpointer.checkpoint_dir": text_of("model.name_or_path"),
            "model._component_": _tuner_model,
            "model.lora_attn_modules": attention_modules,
            "model.lora_rank": lambda value, given: {"adapter.r": value},
            "model.lora_alpha": lambda value, given: {"adapter.alpha": value},
            "model.lora_dropout": lambda value, given: {"adapter.dropout": value},
            "tokenizer.max_seq_len": lambda value, given: {"data.max_length": value},
            "tokenizer.path": _nothing,
            "tokenizer.prompt_template": _TEMPLATE_OF_TORCHTUNE,
            "dataset.prompt_template": _TEMPLATE_OF_TORCHTUNE,
            "dataset.new_system_prompt": _SYSTEM,
            "model.apply_lora_to_output": _output_layer,
            "shuffle": switch("data.shuffle", True, False),
            "dataset": data_sets,
            "optimizer._component_": builder,
            "lr_scheduler._component_": builder,
            "metric_logger._component_": lambda value, given: metric_logger(
                {"_component_": value, "project": given.get("metric_logger.project")}, given
            ),
            "teacher_checkpointer.checkpoint_dir": teacher,
            "kd_loss._component_": kd_loss,
            "loss.beta": lambda value, given: {"method.beta": value},
            "loss.label_smoothing": lambda value, given: {"method.label_smoothing": value} if value else {},
        },
        _keys(
            "resume_from_checkpoint model.apply_lora_to_mlp optimizer.fused "
            "checkpointer profiler loss tokenizer metric_logger log_every_n_steps log_peak_memory_stats "
            "dataset model.use_dora lr_scheduler.num_cycles teacher_checkpointer teacher_model kd_loss"
        ),
    ),
    "ms-swift": Dialect(
        "ms-swift",
        _keys(
            "train_type tuner_type rlhf_type torch_dtype split_dataset_ratio custom_dataset_info freeze_vit sft_type "
            "model_author target_modules loss_scale val_dataset use_hf strict system"
        ),
        {
            "adapter.kind": "lora",
            "adapter.r": 8,
            "adapter.alpha": 32,
            "adapter.dropout": 0.05,
            "optimizer.betas": [0.9, 0.95],
            "schedule.warmup": "never",
            "optimizer.lr": 1e-4,
            "train.duration": "3 epochs",
            "train.micro_batch_size": 1,
            "data.packing": False,
        },
        {
            "model": text_of("model.name_or_path"),
            "dataset": _swift_sets,
            "val_dataset": _swift_held_out,
            "template": chat_template,
            "loss_scale": words("method.train_on", _LOSS_SCALES),
            "system": _SYSTEM,
            "max_length": lambda value, given: {"data.max_length": value},
            "strict": switch("data.on_bad_row", "error", "skip"),
        },
        _keys("model_author model_name logging_dir add_version"),
    ),
    "unsloth": Dialect(
        "Unsloth",
        _keys(
            "max_seq_length random_state use_gradient_checkpointing load_in_4bit full_finetuning use_rslora "
            "loftq_config model_name finetune_vision_layers train_on_completions"
        ),
        _HF
        | {
            "adapter.kind": "lora",
            "schedule.kind": "linear",
            "data.packing": False,
            "method.train_on": "all",
            "optimizer.lr": 2e-4,
            "seed": 3407,
        },
        {
            "model": text_of("model.name_or_path"),
            "batch_size": micro_batch,
            "training_type": _tuner_kind,
            "train_on_completions": switch("method.train_on", "assistant", "all"),
            "r": lambda value, given: {"adapter.r": value},
        },
    ),
}


def detect(keys: frozenset[str]) -> Tool | None:
    """The tool whose marks most of the keys are; None where none of them is any tool's."""
    scores = {tool: len(keys & dialect.marks) for tool, dialect in DIALECTS.items()}
    best = max(scores, key=lambda tool: (scores[tool], tool != "trl"))  # whose keys others have, too
    if "_component_" in keys:
        return "torchtune"
    return best if scores[best] else None
