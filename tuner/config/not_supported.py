"""What other tools have and `tuner` has not, with what to write instead: the table of docs/not-supported.md.

One file, although a long one: it is one table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    """A feature by the keys that ask for it elsewhere, and the way to the same end here."""

    topic: str
    """Heading in the documents."""
    names: str
    """Keys of other tools, separated by spaces, in lower case with underscores."""
    what: str
    instead: str
    needed: bool = True
    """Whether its users lose something: false for what happens here without a key."""

    @property
    def sentence(self) -> str:
        """What an error says about one of its keys."""
        if self.needed:
            return f"not supported: {self.what}; instead {self.instead}"
        return f"not needed: {self.what}; {self.instead}"


_METHODS, _MEMORY, _MODEL, _DATA = "Methods", "Memory and precision", "Models and kernels", "Data and templates"
_PARALLEL, _RUN, _HUB = "Several processes", "The run", "The hub and trackers"

ABSENT: tuple[Absent, ...] = (
    Absent(
        _METHODS,
        "dpo_alpha ref_model_adapters ref_adapters ref_model_quantization_bit ref_model_type ref_model_revision "
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
        "a reference other than the model at the start",
        "method.reference: columns or adapter_off; for another one start from it: model.name_or_path",
    ),
    Absent(
        _METHODS,
        "reference_free",
        "dpo without a reference",
        "method.kind: simpo, orpo or cpo, which have none",
    ),
    Absent(
        _METHODS,
        "pref_bco_weight ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting dpo_use_weighting "
        "discopop_tau alpha_po",
        "preference losses other than those of method.kind: dpo, orpo, simpo and kto (EXO, AOT, DiscoPOP, WPO, LD-DPO)",
        "one of method.loss with method.kind: dpo",
    ),
    Absent(
        _METHODS,
        "reward_funcs reward_model_type reward_weights reward_fn kl_coef ppo_epochs ppo_target "
        "ppo_buffer_size "
        "ppo_score_norm ppo_whiten_rewards num_generations num_ppo_epochs grpo_beta trl vllm use_vllm vllm_mode "
        "vllm_server_host rollout max_completion_length cliprange vf_coef process_reward_model",
        "reinforcement learning (PPO, GRPO, RLOO, online DPO) and process reward models",
        "method.kind: dpo or kto on answers that were sampled and judged beforehand, or method.kind: reward for a "
        "model that ranks them",
    ),
    Absent(
        _METHODS,
        "gkd kd_trainer seq_kd kd_alpha kd_ce_alpha",
        "distillation on answers that the student generates (on-policy), and weights that do not add up to one",
        "method.kind: distill on the data's answers, with method.ce_weight for the cross-entropy and the rest for "
        "the divergence",
    ),
    Absent(
        _METHODS,
        "neftune_noise_alpha neftune noisy_embedding_alpha",
        "NEFTune noise on the embeddings",
        "adapter.dropout: 0.05 with an adapter, or none",
    ),
    Absent(
        _METHODS,
        "label_smoothing_factor use_dft_loss use_eaft_loss eaft_alpha chunked_cross_entropy use_asft_loss asft_alpha",
        "losses other than next-token cross-entropy",
        "method.kind: custom with method.use: FILE.py:NAME",
    ),
    Absent(
        _METHODS,
        "mixture_of_depths use_llama_pro freeze_parameters_ratio freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules "
        "unfrozen_parameters lisa_n_layers lisa_step_interval lisa_layers_attr lisa_activated_layers "
        "spectrum_top_fraction",
        "layers that are added, or selected by number or during training (LLaMA Pro, LISA, Spectrum)",
        "model.freeze with the names or globs of what is not trained, such as [embed_tokens]",
    ),
    Absent(
        _METHODS,
        "curriculum_sampling curriculum sampler_type data_seed_order",
        "curriculum ordering",
        "data.shuffle: false, which keeps the order of the files",
    ),
    Absent(
        _DATA,
        "interleave_probs dataset_weights probabilities mixing_weights sampling_weight",
        "data sets mixed by the probability of each",
        "weight in an item of data.train, the share of its documents that is taken, or count, their number",
    ),
    Absent(
        _DATA,
        "data_seed",
        "a seed of its own for the order of the rows",
        "seed, which gives it too",
    ),
    Absent(
        _MEMORY,
        "gptq gptq_groupsize gptq_disable_exllama gptq_disable_exllama_v1 load_in_fp8 hqq hqq_config hqq_axis "
        "quantization llm_int8_enable_fp32_cpu_offload llm_int8_threshold "
        "llm_int8_has_fp16_weight quanto aqlm eetq awq fp4",
        "bases quantised otherwise (GPTQ, AWQ, AQLM, HQQ, EETQ, fp4, LLM.int8)",
        "model.quantize: nf4 or int8, which quantises the original as it is loaded",
    ),
    Absent(
        _MEMORY,
        "quantizer qat quantization_aware_training",
        "training for a quantisation that comes afterwards (QAT)",
        "model.quantize: nf4 or int8 for a base that has few bits in training, too",
    ),
    Absent(
        _MEMORY,
        "bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant",
        "scales of the quantised base that are quantised themselves (double quantisation), which saves 0.4 bits a "
        "weight",
        "model.quantize: nf4, which keeps a float32 scale for 64 weights",
    ),
    Absent(
        _MEMORY,
        "upcast_layernorm upcast_lmhead_output",
        "another type for single layers",
        "model.dtype: fp32",
    ),
    Absent(
        _MEMORY,
        "fused q_lora_bits "
        "bnb_4bit_quant_storage qlora_sharded_model_loading fp16_full_eval bf16_full_eval fp16_opt_level loss_scale "
        "initial_scale_power fp16_scale_tolerance autocast fp8_recipe fp8_config fp8_backend "
        "fp8_enable_fsdp_float8_all_gather half_precision_backend tiled_mlp_num_shards tiled_mlp_use_original_mlp "
        "activation_offload_streams",
        "how model.quantize, train.precision and train.tiled_mlp are carried out follows from the model and the "
        "device, and the loss of fp16 is scaled as it needs",
        "leave it out",
        needed=False,
    ),
    Absent(
        _MEMORY,
        "use_galore galore_target galore_rank galore_scale galore_proj_type galore_update_interval use_apollo "
        "apollo_rank apollo_scale use_badam badam_mode badam_switch_mode badam_switch_interval badam_update_ratio "
        "optim_target_modules lomo use_adam_mini q_galore adam_mini use_muon_clip optimizer_in_bwd",
        "GaLore, APOLLO, BAdam, LOMO, and states of few bits but for AdamW's",
        "optimizer.state: 8bit or optimizer.offload: host with optimizer.kind: adamw, or adapter.kind: lora",
    ),
    Absent(
        _MEMORY,
        "offload_param cpu_offload_gb custom_sharded_full_state_dict offload_embeddings embedding_offload nvme_path "
        "offload_optimizer_nvme_path offload_param_device sequence_len_overflow_handling",
        "weights in the host's memory, and anything on a disk, while a step runs",
        "model.quantize: nf4 for a frozen base, optimizer.offload: host for AdamW's states, "
        "train.offload_activations: true, or parallel.shard: full over more GPUs",
    ),
    Absent(
        _MEMORY,
        "auto_find_batch_size torch_empty_cache_steps torch_empty_cache_freq empty_cache_steps",
        "finding the batch size by trial",
        "train.micro_batch_size: auto, the default, which finds it by prediction; tuner profile RECIPE --fit prints it",
    ),
    Absent(
        _MODEL,
        "trust_remote_code trust_remote_code_model remote_code allow_remote_code custom_register_path external_plugins",
        "code from a model's or data set's repository, which is never run",
        "a model_type that transformers has itself",
    ),
    Absent(
        _MODEL,
        "flash_attention flash_attn flash_attn_2 use_flash_attn use_flash_attention use_flash_attention_2 "
        "attn_implementation attn_impl attention_implementation attn sdp_attention xformers_attention eager_attention "
        "flex_attention flash_attn_rms_norm flash_attn_cross_entropy flash_attn_fuse_qkv flash_attn_fuse_mlp "
        "s2_attention "
        "flash_optimum xformers shift_attn sparse_attn",
        "attention is chosen for the device, and packed documents never see each other",
        "leave it out",
        needed=False,
    ),
    Absent(
        _MODEL,
        "use_unsloth use_unsloth_gc use_unsloth_vllm unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o "
        "unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope unsloth lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel "
        "use_cce cut_cross_entropy",
        "Unsloth's kernels, and kernels chosen per layer",
        "model.kernels: auto, which takes liger on CUDA and native ones on a CPU",
    ),
    Absent(
        _MODEL,
        "rope_scaling rope_factor rope_theta_scaling use_longlora yarn_factor",
        "a key for RoPE scaling",
        "model.config: {rope_parameters: {...}}, which overrides the model's config.json",
    ),
    Absent(
        _MODEL,
        "tie_embeddings tie_word_embeddings untie_embeddings",
        "a key for embeddings that are the output layer, too",
        "model.config: {tie_word_embeddings: true}, which overrides the model's config.json",
    ),
    Absent(
        _MODEL,
        "rank_pattern alpha_pattern",
        "ranks and scales by layer",
        "one adapter.r and adapter.alpha for all of adapter.target_modules",
    ),
    Absent(
        _MODEL,
        "use_pissa pissa_init pissa_iter pissa_convert loftq loftq_config loftq_bits init_lora_weights "
        "peft_init_lora_weights "
        "lora_init use_vera vera_rank use_lokr use_loha use_oft oft_rank oft_block_size adalora adalora_target_r "
        "adapter_layers prefix_tuning num_virtual_tokens prompt_tuning ia3 use_ia3 layers_to_transform "
        "peft_layers_to_transform lora_layers layers_pattern lora_fan_in_fan_out lora_bias bias "
        "peft_autocast_adapter_dtype relora relora_steps relora_prune_ratio mora_rank",
        "adapter types and initialisations other than LoRA, rsLoRA and DoRA",
        "adapter.kind: lora or dora, with adapter.use_rslora: true or adapter.target_modules",
    ),
    Absent(
        _MODEL,
        "image_max_pixels image_min_pixels video_max_pixels freeze_vision_tower freeze_multi_modal_projector "
        "train_mm_proj_only vision_tower image_size freeze_vit freeze_aligner freeze_llm processor_type is_multimodal "
        "media_dir image_resolution max_pixels modules_to_not_convert",
        "images, audio and video",
        "a text model with method.kind: sft",
    ),
    Absent(
        _MODEL,
        "num_labels problem_type task_type classification score_head",
        "classification heads",
        "method.kind: sft with the label as the answer",
    ),
    Absent(
        _DATA,
        "group_by_length length_column_name train_sampling_strategy sort_by_length bucket_by_length",
        "rows are packed, so there is almost no padding to avoid",
        "leave it out, and keep data.packing: auto",
        needed=False,
    ),
    Absent(
        _DATA,
        "resize_vocab resize_token_embeddings resize_token_embeddings_to_32x shrink_embeddings pad_to_multiple_of "
        "embeddings_skip_upcast new_special_tokens_config init_special_tokens",
        "the embeddings grow automatically with added tokens",
        "name them: tokenizer.add_tokens: [TOKEN]",
        needed=False,
    ),
    Absent(
        _DATA,
        "pad_to_sequence_len pad_to_max_length dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor "
        "dataloader_pin_memory dataloader_persistent_workers remove_unused_columns pin_memory dataset_shard_num "
        "dataset_processes_memory ds_type "
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "eval_accumulation_steps prediction_loss_only overwrite_cache skip_prepare_dataset lazy_tokenize "
        "dataloader_shuffle streaming_buffer label_names ignore_data_skip dataset_kwargs load_from_cache_file "
        "preprocessing_batch_size ignore_pad_token_for_loss pad_token_id label_pad_token_id multipack_max_len "
        "batch_flattening",
        "prepared rows are memory-mapped, and none is padded or dropped",
        "leave it out",
        needed=False,
    ),
    Absent(
        _DATA,
        "streaming dataset_streaming buffer_size pretraining_dataset_streaming dispatch_batches split_batches",
        "training on streamed data",
        "tuner prepare-data RECIPE, which prepares rows once and maps them from disk",
    ),
    Absent(
        _DATA,
        "pretraining_dataset",
        "a separate key for plain text",
        "method.kind: pretrain with data.train",
    ),
    Absent(
        _DATA,
        "system default_system default_system_message system_prompt train_on_eos train_on_eot eot_tokens "
        "enable_thinking "
        "reasoning_effort ignore_empty_think preserve_thinking tool_format response_prefix agent_template "
        "loss_scale_config mask_inputs train_on_split split_thinking field_system",
        "chat-template options in the recipe",
        "a template of your own, tokenizer.chat_template: FILE.jinja",
    ),
    Absent(
        _DATA,
        "eos_token bos_token pad_token unk_token",
        "special tokens that a recipe names",
        "the tokenizer's own, and a template that ends turns with another: tokenizer.chat_template: FILE.jinja",
    ),
    Absent(
        _DATA,
        "eval_packing eval_sample_packing",
        "held-out rows are packed as the others are, which changes no figure",
        "leave it out",
        needed=False,
    ),
    Absent(
        _DATA,
        "use_fast use_slow_tokenizer use_fast_tokenizer tokenizer_use_fast tokenizer_legacy tokenizer_type "
        "tokenizer_use_mistral_common padding_side",
        "the tokenizer is loaded as transformers loads it",
        "leave it out",
        needed=False,
    ),
    Absent(
        _PARALLEL,
        "deepspeed_config zero_stage zero_optimization zero3_init ds3_gather_for_generation deepspeed_plugin",
        "DeepSpeed and its configuration files",
        "parallel.shard: full, which splits weights, gradients and moments as ZeRO-3 does",
    ),
    Absent(
        _PARALLEL,
        "fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_state_dict_type "
        "fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_use_orig_params fsdp_final_state_dict_type fsdp_plugin "
        "fsdp_sync_module_states fsdp_forward_prefetch fsdp_limit_all_gathers fsdp_activation_checkpointing "
        "accelerator_config accelerate_config",
        "FSDP configuration",
        "parallel.shard: full or hybrid (FSDP2 over the decoder layers), with parallel.reshard_after_forward",
    ),
    Absent(
        _PARALLEL,
        "pipeline_parallel_size pipeline_parallel_degree pipeline_parallel_dim pipeline_model_parallel_size pp_size "
        "pipeline_parallel_schedule pipeline_parallel_microbatch_size virtual_pipeline_model_parallel_size",
        "pipelines of layers",
        "parallel.shard: full, which splits every layer, or parallel.tensor",
    ),
    Absent(
        _PARALLEL,
        "context_parallel_size context_parallel_degree context_parallel_dim cp_size ring_attn_func ring_attention "
        "heads_k_stride ring_degree",
        "attention in a ring of processes",
        "parallel.sequence, which cuts rows and gives each process some of the heads (Ulysses)",
    ),
    Absent(
        _PARALLEL,
        "sequence_parallel enable_sequence_parallel",
        "norms on a part of each row inside a tensor group",
        "parallel.sequence, which cuts rows for whole layers and goes together with parallel.tensor",
    ),
    Absent(
        _PARALLEL,
        "expert_tensor_parallel_size expert_tensor_parallel_degree etp_size",
        "experts that are split by tensor groups of their own",
        "parallel.expert, which keeps each expert whole",
    ),
    Absent(
        _PARALLEL,
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend local_rank dist_backend "
        "average_tokens_across_devices include_tokens_per_second include_num_input_tokens_seen",
        "processes are set up, and losses averaged over all tokens, automatically",
        "leave it out",
        needed=False,
    ),
    Absent(
        _RUN,
        "resume_from_checkpoint auto_resume_from_checkpoints resume checkpoint_to_resume ckpt_path resume_from "
        "load_checkpoint should_load_recipe_state",
        "resuming from a key of the recipe",
        "tuner train RECIPE --resume auto, or tuner resume RUN",
    ),
    Absent(
        _RUN,
        "do_train do_predict do_sample predict_with_generate overwrite_output_dir disable_tqdm logging_nan_inf_filter "
        "logging_first_step logging_strategy plot_loss log_on_each_node past_index "
        "skip_memory_metrics include_inputs_for_metrics log_peak_memory_stats eval_do_concat_batches "
        "save_safetensors safe_serialization save_on_each_node save_adapter_weights_only",
        "the command says what is done, and every step is in metrics.jsonl",
        "leave it out",
        needed=False,
    ),
    Absent(
        _RUN,
        "eval_delay",
        "a first evaluation that waits",
        "eval.every, and eval.at_start for the one before the first step",
    ),
    Absent(
        _RUN,
        "profile_freq",
        "a profile every so many steps",
        "profile.steps: [10, 11], the steps themselves",
    ),
    Absent(
        _RUN,
        "save_only_model",
        "checkpoints without the optimizer's state",
        "checkpoint.keep: 1, and export.every for directories of weights alone",
    ),
    Absent(
        _RUN,
        "bench_dataset do_bench_eval eval_causal_lm_metrics compute_metrics compute_accuracy metric_for_eval "
        "eval_metrics",
        "metrics of held-out rows other than the loss and the method's figures",
        "eval.tasks, with a scorer of your own: docs/tasks.md",
    ),
    Absent(
        _RUN,
        "sweep hp_search sweep_config n_trials",
        "searches over hyperparameters",
        "a shell loop with --optimizer.lr and --name, then tuner runs compare",
    ),
    Absent(
        _HUB,
        "push_to_hub push_to_hub_model_id hub_model_id hub_strategy hub_private_repo hub_always_push "
        "hub_revision push_dataset_to_hub hf_use_auth_token push_to_hub_organization",
        "pushing to the hub from a recipe",
        "tuner push RUN OWNER/NAME when the run is done",
    ),
    Absent(
        _HUB,
        "hub_token hf_hub_token use_auth_token token push_to_hub_token ms_hub_token wandb_api_key om_hub_token",
        "secrets in a recipe",
        "the environment (HF_TOKEN, WANDB_API_KEY) or hf auth login",
    ),
    Absent(
        _HUB,
        "use_swanlab swanlab_project use_comet comet_api_key comet_workspace use_trackio trackio_space_id "
        "neptune_project "
        "swanlab_mode swanlab_workspace otel_metrics_port ray_run_name ray_num_workers",
        "trackers other than TensorBoard, Weights & Biases and MLflow",
        "logging.trackers: [tensorboard], or hooks: [FILE.py:NAME] for one of your own",
    ),
    Absent(
        _HUB,
        "wandb_entity wandb_watch wandb_log_model wandb_mode hf_mlflow_log_artifacts mlflow_tracking_uri "
        "tensorboard_log_dir",
        "tracker settings other than project and tags",
        "the tracker's environment variables (WANDB_ENTITY, WANDB_MODE, MLFLOW_TRACKING_URI)",
    ),
    Absent(
        _HUB,
        "use_modelscope use_hf use_hf_hub use_om use_openmind model_type_ms infer_backend use_chat_template_ms "
        "cached_dataset",
        "other hubs than Hugging Face",
        "a local directory, model.name_or_path: ./DIRECTORY",
    ),
)
"""Every feature, by topic."""

ABSENT_NAMES: dict[str, Absent] = {name: absent for absent in ABSENT for name in absent.names.split()}
"""The same by key."""


def absent(name: str) -> Absent | None:
    """The feature that a key of another tool asks for and that is not here; None where it is no such key."""
    return ABSENT_NAMES.get(name.lower().replace("-", "_"))
