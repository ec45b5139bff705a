"""Keys of other tools with their values, converted to ours: the table of what each becomes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.eval_tasks import HARNESS
from tuner.config.not_supported import absent_names
from tuner.config.other_keys import (
    attention_modules,
    batch,
    cadence_rules,
    deepspeed,
    epochs,
    fsdp,
    lambda_of_gkd,
    layers_of_litgpt,
    metric_logger,
    micro_batch,
    rank,
    record_count,
    revision,
    steps_per_epoch,
    text_column,
    torchtune_loss,
    tracker_project,
    trainer,
    truncation,
    use_tracker,
    warmup_share,
    warmup_steps,
)
from tuner.config.other_memory import ADAMW_VALUES, RULES_OF_MEMORY
from tuner.config.other_methods import RULES_OF_METHODS, kind
from tuner.config.other_parts import (
    adapters,
    builder,
    chat_template,
    data_set,
    data_sets,
    experts,
    held_out,
    held_out_sets,
    kernels,
    loraplus,
    names_in,
    new_tokens,
    plugins,
    roles,
    targets,
    text_of,
    trackers,
)
from tuner.config.other_rules import (
    PER_DEVICE,
    Given,
    Lines,
    Rule,
    accumulated,
    betas,
    bf16,
    count_of,
    cycles,
    dtype,
    min_lr,
    note,
    number_of,
    packing,
    per_epoch,
    scheduler_options,
    seconds,
    share_of,
    strategy,
    switch,
    words,
)
from tuner.config.other_tools import FOREIGN, THEIRS


def convert(name: str, value: Any, given: Given) -> Lines | str | None:
    """Return what to write for a key of another tool, or a note in place of that; None where neither is known.

    `given` are all keys of its configuration; `processes` among them, if there, says on how many it ran.
    """
    key = name.lower().replace("-", "_")
    rule = RULES.get(key)
    value = _switched(value)
    if rule is not None:
        return rule(value, given)
    ours = THEIRS.get(key)
    return {ours: value} if ours is not None and not isinstance(value, Mapping) else None


def _switched(value: Any) -> Any:
    """DeepSpeed's and torchtitan's sections of a switch, `{enabled: true}`, as the switch alone."""
    if isinstance(value, Mapping):
        on = [found for key, found in value.items() if key in ("enable", "enabled") and isinstance(found, bool)]
        return on[0] if on else value
    return value


@cache
def known_names() -> tuple[str, ...]:
    """Every key of another tool that can be answered, those of what is not supported included."""
    return (*dict.fromkeys([*RULES, *THEIRS, *absent_names()]),)


_STEPS = count_of("train.duration", "steps")
_OFFLOADED = {"train.gradient_checkpointing": "full", "train.offload_activations": True}
_RECOMPUTED = words(
    "train.gradient_checkpointing", {"true": "full", "false": "none", "unsloth": "full", "offload": _OFFLOADED}
)
_ADAPTER = {"lora": "lora", "dora": "dora", "full": "none"}
_SCHEDULES: dict[str, Any] = {
    "cosine": "cosine", "linear": "linear", "inverse_sqrt": "inverse_sqrt", "constant_with_warmup": "constant",
    "constant": {"schedule.kind": "constant", "schedule.warmup": "never"}, "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine", "polynomial": "linear", "wsd": "wsd",
}  # fmt: skip
_OPTIMIZERS: dict[str, Any] = dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "torch.optim.adamw", "adam"), "adamw"
) | {
    "adafactor": "adafactor",
    "muon": "muon",
    **ADAMW_VALUES,
    "sgd": {"optimizer.kind": "sgd", "optimizer.momentum": 0},
}
_STAGES = {"sft": "sft", "pt": "pretrain", "pretrain": "pretrain"}


def harness_tasks(value: Any, given: Given) -> Lines | str | None:
    """Tasks of lm-evaluation-harness, by their names there."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    return {"eval.tasks": [f"{HARNESS}{name}" for name in names]}


def _stage(value: Any, given: Given) -> Lines | str | None:
    """A kind of training, of pre-training and supervised fine-tuning as of preferences."""
    return words("method.kind", _STAGES)(value, given) if str(value).lower() in _STAGES else kind(value, given)


_TABLE: dict[str, Rule] = {
    "num_epochs num_train_epochs epochs max_epochs": epochs,
    "max_steps total_steps train_iters min_iterations": _STEPS,
    " ".join(PER_DEVICE): micro_batch,
    "per_device_eval_batch_size eval_batch_size": note(
        "evaluation runs with train.micro_batch_size rows; leave it out"
    ),
    "gradient_accumulation_steps": accumulated,
    "train_batch_size total_batch_size effective_batch_size": number_of("train.global_batch_size"),
    "batch_size": batch,
    "bf16 amp": bf16,
    "pure_bf16": switch("model.dtype", "bf16", "auto"),
    "tf32 allow_tf32": switch("train.tf32", True, False),
    "float32_matmul_precision": words("train.tf32", {"high": True, "highest": False}),
    "torch_dtype model_dtype weights_dtype": dtype,
    "use_cpu no_cuda": switch("train.device", "cpu"),
    "enable_gradient_checkpointing activation_checkpointing enable_activation_checkpointing "
    "use_gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": note("recomputing needs no options; write train.gradient_checkpointing: full"),
    "torch_compile use_compile compile_model": switch("train.compile", True, False),
    "torch_compile_backend torch_compile_mode": note("write train.compile: true; it has no options"),
    "max_grad_norm max_norm gradient_clipping clip_grad_norm grad_clip gradient_clip_val": (
        number_of("train.max_grad_norm", "never")
    ),
    "full_determinism use_deterministic use_deterministic_algorithms": switch("train.deterministic", True),
    "learning_rate max_lr peak_lr base_lr": number_of("optimizer.lr"),
    "optim": words("optimizer.kind", _OPTIMIZERS),
    "adam_beta1 adam_beta2 beta1 beta2": betas,
    "adam_epsilon adam_eps optimizer_eps": number_of("optimizer.eps"),
    "loraplus_lr_ratio": loraplus,
    "lr_scheduler_type lr_scheduler scheduler": cycles(words("schedule.kind", _SCHEDULES)),
    "warmup_ratio": warmup_share,
    "warmup_steps": warmup_steps,
    "num_warmup_steps lr_warmup_steps lr_warmup_iters": share_of("schedule.warmup", "never"),
    "cosine_min_lr_ratio min_lr_factor": number_of("schedule.min_lr_ratio"),
    "min_lr_rate": number_of("schedule.min_lr_ratio"),
    "min_lr lr_end eta_min": min_lr,
    "lr_scheduler_kwargs scheduler_kwargs": scheduler_options,
    "num_decay_steps lr_wsd_decay_iters wsd_decay_steps decay_ratio": share_of("schedule.decay", None),
    "evals_per_epoch": per_epoch("eval.every"),
    "eval_strategy evaluation_strategy": strategy("eval.every", "eval_steps"),
    "eval_on_start val_before_train eval_first_step": switch("eval.at_start", True, False),
    "do_eval eval_on_end final_eval": switch("eval.at_end", True),
    "lm_eval_tasks": harness_tasks,
    "saves_per_epoch": per_epoch("checkpoint.every"),
    "save_strategy": strategy("checkpoint.every", "save_steps"),
    "metric_for_best_model save_best_only monitor": (
        words("checkpoint.keep_best", {"eval_loss": "eval/loss", "loss": "eval/loss", "true": "eval/loss"})
    ),
    "load_best_model_at_end": switch("checkpoint.keep_best", "eval/loss"),
    "early_stopping_patience early_stopping_rounds early_stop_patience": number_of("eval.patience"),
    "min_iters min_train_steps": number_of("train.min_steps"),
    "ema_decay ema_rate model_ema_decay": number_of("ema.decay"),
    "early_stopping": note("eval.patience is the number of evaluations without a better loss after which a run ends"),
    "early_stopping_threshold early_stopping_min_delta early_stopping_delta": number_of("eval.min_delta"),
    "logging_steps loss_log_interval log_interval logging_interval log_every log_freq log_every_n_steps": (
        note("every step is in metrics.jsonl; the console has logging.console_every: 2 s")
    ),
    "val_set_size val_size validation_split split_dataset_ratio": held_out,
    "dataset_name hf_hub_url": data_set,
    "dataset_text_field": text_column,
    "devices": number_of("parallel.processes"),
    "deepspeed": deepspeed,
    "fsdp": fsdp,
    "max_samples num_samples max_train_samples n_samples sample_size": record_count,
    "model_revision revision_of_model base_model_revision": revision,
    "lora_query lora_key lora_value lora_projection lora_mlp lora_head": layers_of_litgpt,
    "disable_gradient_checkpointing": switch("train.gradient_checkpointing", "none", "auto"),
    "sample_packing packed pack_sequences": switch("data.packing", "auto", False),
    "packing neat_packing": packing,
    "padding_free": switch("data.packing", "auto"),
    "disable_shuffling": switch("data.shuffle", False),
    "truncation truncation_mode truncation_side truncation_strategy excess_length_strategy": truncation,
    "train_on_inputs": switch("method.train_on", "all", "assistant"),
    "train_on_prompt train_on_input train_on_source": switch("method.train_on", "all", "assistant"),
    "assistant_only_loss completion_only_loss": switch("method.train_on", "assistant", "all"),
    "mask_history train_on_last_turn_only": switch("method.train_on", "last_assistant"),
    "roles_to_train": roles,
    "stage task trainer_type training_type": _stage,
    "finetuning_type peft_type adapter_type train_type tuner_type": words("adapter.kind", _ADAPTER),
    "use_peft": switch("adapter.kind", "lora"),
    "peft": switch("adapter.kind", "lora"),
    "use_dora peft_use_dora lora_dora": switch("adapter.kind", "dora"),
    "lora_target_modules lora_target lora_modules target_modules": targets,
    "lora_target_linear": switch("adapter.target_modules", "all-linear"),
    "target_parameters lora_target_parameters": experts,
    "lora_modules_to_save additional_target trainable_modules": names_in("adapter.modules_to_save"),
    "freeze_layers freeze_parameters freeze_modules": names_in("model.freeze"),
    "lora_model_dir adapter_name_or_path adapter_folder adapters resume_adapter lora_weights lora_checkpoint "
    "peft_model_id": adapters,
    "create_new_adapter": note("true is adapter: merge in an entry of model.init_from; false is its default"),
    " ".join(FOREIGN["model.kernels"]): kernels,
    "from_scratch train_from_scratch random_init reinit_weights": switch("model.init", "random"),
    "add_special_tokens additional_special_tokens special_tokens tokens extra_special_tokens new_special_tokens": (
        new_tokens
    ),
    "split_special_tokens parse_special_tokens": switch("tokenizer.special_tokens_in_text", "escape"),
    "report_to loggers log_with tracking": trackers,
    "use_wandb use_tensorboard use_mlflow enable_wandb enable_tensorboard": use_tracker,
    "wandb_project mlflow_experiment_name": tracker_project,
    "wandb_tags run_tags mlflow_tags": names_in("logging.tags"),
    " ".join(FOREIGN["parallel.tensor"]): number_of("parallel.tensor", 1),
    " ".join(FOREIGN["parallel.sequence"]): number_of("parallel.sequence", 1),
    " ".join(FOREIGN["parallel.expert"]): number_of("parallel.expert", 1),
    "ddp_timeout dist_timeout nccl_timeout timeout_seconds": seconds,
    "nccl_default_timeout_minutes": count_of("parallel.timeout", "min"),
    "exit_duration_in_mins": count_of("train.stop_after", "min"),
    "merge_lora": switch("export.adapter", "merge", "keep"),
    "max_steps_per_epoch": steps_per_epoch,
    "dtype": dtype,
    "full_finetuning": switch("adapter.kind", "none", "lora"),
    "lora_r lora_rank rank r": rank,
    "datasets dataset": data_sets,
    "test_datasets val_dataset": held_out_sets,
    "_component_": builder,
    "tokenizer.path": text_of("tokenizer.name_or_path"),
    "random_state": number_of("seed"),
    "metric_logger": metric_logger,
    "loss": torchtune_loss,
    "type": trainer,
    "lmbda": lambda_of_gkd,
    "plugins": plugins,
    "lora_attn_modules": attention_modules,
    "apply_lora_to_mlp": lambda value, given: {},  # attention_modules reads it
    "chat_template template": chat_template,
    "add_tokens added_tokens": new_tokens,
    "modules_to_save": names_in("adapter.modules_to_save"),
    "checkpoint_dir": note(
        "model.name_or_path is where the weights are read from, output_dir where the run is written"
    ),
    "resume_only_model": note("the weights of another run are an entry of model.init_from"),
    "lr_scheduler_config": scheduler_options,
}
RULES: dict[str, Rule] = {name: rule for names, rule in _TABLE.items() for name in names.split()}
RULES |= RULES_OF_METHODS | RULES_OF_MEMORY | cadence_rules()
"""How the values of other tools' keys become ours; a key that is not here keeps its value under our name."""
