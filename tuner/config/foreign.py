"""Names that other tools use, and ours: one table, printed in docs/coming-from.md."""

from __future__ import annotations

FOREIGN: dict[str, tuple[str, ...]] = {
    "version": ("recipe_version", "config_version", "schema_version"),
    "name": ("run_name", "experiment_name", "wandb_name", "wandb_run_id"),
    "output_dir": ("output_directory", "out_dir", "save_dir", "output_path", "checkpoint_dir", "logging_dir"),
    "seed": ("random_seed", "data_seed", "manual_seed"),
    "model.name_or_path": (
        "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_path", "model_id",
        "base_model_config",
    ),
    "model.revision": ("model_revision", "revision_of_model", "base_model_revision"),
    "model.init": ("from_scratch", "train_from_scratch", "random_init", "reinit_weights", "init_weights"),
    "model.config": (
        "config_overrides", "overrides_of_model_config", "model_config", "model_kwargs", "model_init_kwargs",
    ),
    "model.dtype": ("torch_dtype", "model_dtype", "weights_dtype"),
    "model.kernels": ("use_liger_kernel", "use_liger", "liger_kernel", "enable_liger_kernel", "liger_rope"),
    "tokenizer.name_or_path": ("tokenizer_config", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "tokenizer.chat_template": ("chat_template_path", "chat_template_jinja", "template", "custom_template"),
    "tokenizer.add_tokens": (
        "add_special_tokens", "additional_special_tokens", "new_special_tokens", "special_tokens", "tokens",
        "extra_special_tokens", "added_tokens", "resize_vocab", "resize_token_embeddings",
    ),
    "tokenizer.special_tokens_in_text": (
        "split_special_tokens", "parse_special_tokens", "encode_special_tokens", "allowed_special",
    ),
    "model.freeze": ("freeze_layers", "freeze_parameters", "frozen_parameters", "freeze_modules", "freeze_backbone"),
    "adapter.kind": (
        "finetuning_type", "peft_type", "use_peft", "adapter_type", "peft", "use_dora", "peft_use_dora", "lora_dora",
    ),
    "adapter.r": ("lora_r", "lora_rank", "rank"),
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.use_rslora": ("peft_use_rslora", "rslora", "use_rank_stabilized"),
    "adapter.modules_to_save": ("lora_modules_to_save", "additional_target", "trainable_modules"),
    "adapter.target_modules": ("lora_target_modules", "lora_target", "lora_target_linear", "lora_modules"),
    "method.kind": ("stage", "rl", "task", "trainer_type", "training_type"),
    "method.use": ("loss_fn", "custom_loss", "loss_function", "compute_loss_func", "trainer_cls"),
    "method.options": ("loss_kwargs", "loss_args", "method_kwargs"),
    "method.rows": ("dataset_type", "row_kind", "data_kind"),
    "method.train_on": (
        "train_on_inputs", "assistant_only_loss", "completion_only_loss", "train_on_prompt", "mask_history",
        "roles_to_train", "train_on_last_turn_only", "train_on_input",
    ),
    "data.train": ("datasets", "dataset", "dataset_name", "train_file", "train_files", "dataset_path", "train_dataset"),
    "data.eval": (
        "val_set_size", "test_datasets", "eval_dataset", "eval_file", "validation_file", "val_size", "val_dataset",
        "validation_split",
    ),
    "data.train.format": ("type", "formatting", "ds_type", "data_format", "dataset_format"),
    "data.train.path": ("data_files", "file_name", "file_path", "filename", "hf_hub_url"),
    "data.train.columns": ("field_messages", "column_map", "rename_columns", "dataset_text_field", "field_instruction"),
    "data.train.weight": ("interleave_probs", "dataset_weights", "probabilities", "mixing_weights", "sampling_weight"),
    "data.train.count": ("max_samples", "num_samples", "max_train_samples", "n_samples", "sample_size"),
    "data.max_length": (
        "sequence_len", "max_seq_length", "max_seq_len", "seq_len", "seq_length", "cutoff_len", "block_size",
        "model_max_length", "context_length", "sequence_length",
    ),
    "data.too_long": ("excess_length_strategy", "truncation", "truncation_mode", "truncation_side", "long_rows"),
    "data.packing": (
        "sample_packing", "packed", "pack_sequences", "neat_packing", "packing_strategy", "eval_sample_packing",
        "multipack_real_batches", "padding_free", "pack_to_max_length",
    ),
    "data.shuffle": ("shuffle_merged_datasets", "shuffle_dataset", "disable_shuffling", "shuffle_data", "data_shuffle"),
    "data.on_bad_row": ("skip_invalid_rows", "ignore_errors", "on_error", "skip_bad_rows", "bad_row_policy"),
    "data.workers": (
        "dataset_num_proc", "preprocessing_num_workers", "dataset_processes", "num_proc", "num_workers",
        "preprocessing_workers",
    ),
    "data.cache_dir": (
        "dataset_prepared_path", "tokenized_path", "preprocessed_path", "cache_path", "dataset_cache_dir",
    ),
    "train.duration": (
        "num_epochs", "num_train_epochs", "max_steps", "epochs", "max_epochs", "total_steps", "train_iters",
    ),
    "train.stop_after": ("max_time", "max_train_time", "time_limit", "exit_duration_in_mins"),
    "train.global_batch_size": (
        "gradient_accumulation_steps", "train_batch_size", "batch_size", "total_batch_size", "effective_batch_size",
    ),
    "train.micro_batch_size": (
        "per_device_train_batch_size", "per_device_eval_batch_size", "train_micro_batch_size_per_gpu",
        "eval_batch_size", "batch_size_per_device", "device_batch_size",
    ),
    "train.precision": ("bf16", "fp16", "tf32", "mixed_precision", "amp", "pure_bf16"),
    "train.device": ("use_cpu", "no_cuda", "device_map", "accelerator"),
    "train.gradient_checkpointing": (
        "activation_checkpointing", "enable_activation_checkpointing", "use_gradient_checkpointing",
        "recompute_granularity", "activation_checkpointing_mode", "gradient_checkpointing_kwargs",
    ),
    "train.gradient_checkpointing_layers": (
        "recompute_num_layers", "selective_ac_option", "activation_checkpoint_interval", "checkpoint_num_layers",
    ),
    "train.compile": ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_compile", "compile_model"),
    "train.max_grad_norm": ("gradient_clipping", "clip_grad_norm", "grad_clip", "gradient_clip_val", "grad_norm_clip"),
    "train.nonfinite": ("skip_nan_grad", "check_for_nan_in_loss", "detect_anomaly", "nan_policy", "terminate_on_nan"),
    "train.skip_spikes": ("loss_watchdog_threshold", "skip_step_sigma_factor", "spike_threshold", "loss_spike_sigma"),
    "train.deterministic": ("full_determinism", "use_deterministic_algorithms", "deterministic_algorithms"),
    "train.overfit_first_batch": ("overfit_batches", "overfit_batch", "overfit_one_batch"),
    "train.mock_batch": ("dry_run_batch", "warmup_batch", "memory_check", "dummy_batch"),
    "optimizer.kind": ("optim", "optimizer_type", "optimizer_name"),
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr", "learning_rate_peak"),
    "optimizer.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas"),
    "optimizer.eps": ("adam_epsilon", "epsilon", "adam_eps", "optimizer_eps"),
    "optimizer.weight_decay": ("wd", "l2", "adam_weight_decay"),
    "optimizer.groups": ("param_groups", "lr_groups", "optimizer_param_groups", "loraplus_lr_ratio", "embedding_lr"),
    "optimizer.momentum": ("sgd_momentum", "muon_momentum"),
    "optimizer.nesterov": ("use_nesterov", "sgd_nesterov"),
    "optimizer.adamw_lr": ("muon_adam_lr", "adam_lr", "embed_lr"),
    "optimizer.adjust_lr": ("adjust_lr_fn", "muon_scale"),
    "optimizer.ns_steps": ("newton_schulz_steps", "muon_ns_steps"),
    "optimizer.decay_rate": ("beta2_decay", "adafactor_decay_rate"),
    "optimizer.clip_threshold": ("adafactor_clip_threshold",),
    "optimizer.scale_parameter": ("multiply_by_parameter_scale",),
    "optimizer.use": ("optimizer_cls", "optimizer_class", "optimizer_cls_and_kwargs", "custom_optimizer"),
    "optimizer.options": ("optim_args", "optimizer_kwargs", "optim_params"),
    "optimizer.elementwise": ("zero_allow_untested_optimizer",),
    "schedule.kind": ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule", "lr_decay_style"),
    "schedule.warmup": ("warmup_ratio", "warmup_steps", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"),
    "schedule.use": ("lr_scheduler_class", "custom_scheduler", "scheduler_fn"),
    "schedule.options": ("scheduler_kwargs", "lr_scheduler_args"),
    "schedule.min_lr_ratio": (
        "cosine_min_lr_ratio", "min_lr", "lr_end", "lr_scheduler_kwargs", "min_lr_rate", "eta_min",
    ),
    "schedule.decay": ("num_decay_steps", "lr_wsd_decay_iters", "wsd_decay_steps", "decay_ratio", "cooldown"),
    "schedule.decay_shape": ("decay_type", "lr_wsd_decay_style", "lr_decay_type", "cooldown_type"),
    "schedule.periods": ("num_cycles", "cycle_length", "t_mult", "period_lengths"),
    "eval.every": (
        "eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy", "eval_interval", "eval_freq",
    ),
    "eval.at_start": ("eval_on_start", "val_before_train", "eval_first_step"),
    "eval.at_end": ("do_eval", "eval_on_end", "final_eval"),
    "eval.max_rows": ("max_eval_samples", "eval_iters", "eval_max_batches", "max_eval_batches", "limit_val_batches"),
    "eval.samples": (
        "do_causal_lm_eval", "eval_table_size", "num_sample_generations", "log_completions", "generate_samples",
    ),
    "checkpoint.every": (
        "save_steps", "saves_per_epoch", "save_strategy", "save_interval", "checkpoint_interval", "save_freq",
    ),
    "checkpoint.at_end": ("save_on_end", "save_last", "save_final", "save_at_end"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "max_checkpoints", "num_to_keep", "keep_latest_k"),
    "checkpoint.keep_best": ("metric_for_best_model", "load_best_model_at_end", "save_best_only", "monitor"),
    "checkpoint.marks": ("fixed_steps", "keep_every_n_steps"),
    "checkpoint.async_save": ("async_mode", "dist_ckpt_async", "async_checkpoint", "use_async_save", "save_async"),
    "export.every": (
        "hf_interval", "hf_save_interval", "export_interval", "hf_save_steps", "save_hf_every", "export_steps",
    ),
    "export.at_end": ("last_save_in_hf", "save_hf", "hf_save_at_end", "export_at_end", "save_hf_at_end"),
    "export.keep": ("hf_max_keep", "max_hf_exports", "export_total_limit", "keep_hf", "num_exports_to_keep"),
    "export.dtype": ("export_dtype", "save_dtype", "hf_dtype", "output_dtype", "hf_export_dtype"),
    "export.shard_size": ("max_shard_size", "export_size", "shard_size_limit", "hf_shard_size", "max_file_size"),
    "export.adapter": ("merge_lora", "merge_and_unload", "save_merged", "merge_weights", "merge_adapter"),
    "parallel.processes": ("nproc_per_node", "num_processes", "num_gpus", "n_gpus", "gpus", "num_devices"),
    "parallel.shard": (
        "fsdp", "fsdp_config", "fsdp_sharding_strategy", "sharding_strategy", "deepspeed", "data_parallel_shard_degree",
        "dp_shard", "hsdp_shard_dim",
    ),
    "parallel.reshard_after_forward": ("fsdp_reshard_after_forward",),
    "parallel.timeout": ("ddp_timeout", "dist_timeout", "nccl_timeout", "timeout_seconds"),
    "profile.steps": (
        "profiler_steps", "profile_step", "profile_steps", "profile_start_step", "profiling_steps", "profile_freq",
    ),
    "profile.memory": ("enable_memory_snapshot", "profile_memory", "memory_snapshot", "profiler_memory"),
    "profile.time": ("enable_profiling", "profile_time", "torch_profiler", "use_profiler", "profiler"),
    "logging.level": ("log_level", "logging_level", "verbosity", "verbose"),
    "logging.trackers": ("report_to", "loggers", "use_wandb", "log_with", "use_tensorboard", "use_mlflow", "tracking"),
    "logging.project": ("wandb_project", "project_name", "mlflow_experiment_name", "comet_project"),
    "logging.tags": ("wandb_tags", "run_tags", "tracker_tags", "mlflow_tags"),
    "hooks": ("callbacks", "trainer_callbacks", "plugins", "custom_callbacks"),
    "logging.console_every": (
        "logging_steps", "log_interval", "logging_interval", "log_every", "log_freq", "report_interval",
    ),
}  # fmt: skip
"""Ours -> theirs. Names are compared in lower case with `-` as `_`, and only where a key is not ours."""

NOTES: dict[str, str] = {
    "gradient_accumulation_steps": "accumulation is derived: train.global_batch_size / (micro_batch_size x processes)",
    "num_epochs": "train.duration: N epochs",
    "num_train_epochs": "train.duration: N epochs",
    "epochs": "train.duration: N epochs",
    "max_epochs": "train.duration: N epochs",
    "max_steps": "train.duration: N steps",
    "total_steps": "train.duration: N steps",
    "train_iters": "train.duration: N steps",
    "warmup_ratio": "schedule.warmup: N%",
    "warmup_steps": "schedule.warmup: N steps",
    "num_warmup_steps": "schedule.warmup: N steps",
    "lr_warmup_steps": "schedule.warmup: N steps",
    "eval_steps": "eval.every: N steps",
    "save_steps": "checkpoint.every: N steps",
    "logging_steps": "logging.console_every: N s; metrics.jsonl has every step",
    "val_set_size": "data.eval: N%",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp32 or bf16",
    "train_on_inputs": "method.train_on: all",
    "use_liger_kernel": "model.kernels: liger",
    "use_cpu": "train.device: cpu",
    "lora_target_linear": "adapter.target_modules: all-linear",
    "from_scratch": "model.init: random",
    "finetuning_type": "adapter.kind: lora, dora or none",
    "use_dora": "adapter.kind: dora",
    "peft_use_dora": "adapter.kind: dora",
}

THEIRS: dict[str, str] = {theirs: ours for ours, names in FOREIGN.items() for theirs in names}


def ours(name: str) -> str | None:
    """Return our name, or the whole thing to write, for a key of another tool; None when it is not in the table."""
    key = name.lower().replace("-", "_")
    return NOTES.get(key) or THEIRS.get(key)
