"""Values that other tools take where ours are others: what to write for them, or what is not supported."""

from __future__ import annotations

from tuner.config.not_supported import absent

_PREFERENCES = "exo aot discopop wpo"
_REINFORCEMENT = "ppo grpo rloo dapo gspo gdpo reinforce online_dpo xpo nash_md ebft rl prm"
_OTHER_BASES = "gptq awq aqlm hqq eetq fp4 bnb.fp4 bnb.fp4-dq quanto llm_int8 fp8 2 3"
_OTHER_ADAPTERS = (
    "loftq ia3 vera loha lokr adalora oft boft prefix prefix_tuning prompt_tuning p_tuning pissa olora llama_adapter "
    "lora_fa longlora relora adapter fourierft bone reft vblora"
)
EIGHT_BIT_ADAMW = (
    "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit adam_8bit adam8bit adamw8bit "
    "pagedadamw8bit"
)
"""Names of AdamW whose states have 8 bits; those that move them to the host under pressure among them."""
PAGED_ADAMW = "paged_adamw paged_adamw_32bit pagedadamw pagedadamw32bit cpuoffloadoptimizer deepspeedcpuadam"
"""Names of AdamW whose states lie in the host's memory, always or under pressure."""
_FEW_BITS = (
    "ademamix_8bit paged_ademamix paged_ademamix_32bit paged_ademamix_8bit lion_8bit paged_lion_8bit paged_lion_32bit "
    "adamw_torch_4bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit "
    "galore_adamw galore_adamw_8bit galore_adafactor apollo_adamw lomo adalomo adam_mini"
)
_NO_OPTIMIZER = (
    "lion lion_pytorch lion_32bit stable_adamw sophia shampoo soap adagrad rmsprop ademamix schedule_free_adamw "
    "grokadamw"
)

_WRITE: dict[str, dict[str, str]] = {
    "method.kind": {
        "distillation kd knowledge_distillation": "distill",
        "pt pre_train pre-training pretraining clm causal_lm lm cpt continued_pretraining": "pretrain",
        "instruct instruction instruction_tuning finetune fine_tune finetuning chat supervised it": "sft",
        "preference preferences pairwise": "dpo",
        **{loss: f"dpo, with method.loss: {loss}" for loss in ("ipo", "hinge", "robust", "sppo", "nca", "bco")},
        "apo": "dpo, with method.loss: apo_zero or apo_down",
        "rm rw reward_model reward_modeling bradley_terry": "reward",
    },
    "adapter.kind": {
        "full full_finetune ft false off": "none",
        "freeze": "none, with model.freeze: [embed_tokens, model.layers.0]",
        "peft true lora_only lora_adapter": "lora",
        "rslora rs_lora": "lora, with use_rslora: true",
        "qlora": "lora, with model.quantize: nf4",
        "qdora": "dora, with model.quantize: nf4",
    },
    "model.quantize": {
        "4 4bit 4-bit bnb_4bit int4 normalfloat4 true yes on qlora bnb bitsandbytes bnb.nf4 bnb.nf4-dq": "nf4",
        "8 8bit 8-bit bnb_8bit bnb.int8 bnb.int8-training": "int8",
        "false no off 16 bf16": "none",
    },
    "model.dtype": {
        "bfloat16 torch.bfloat16": "auto; train.precision: bf16 sets the computation",
        "float16 torch.float16 fp16 half": "auto; train.precision: fp16 sets the computation",
        "nf4 int8 4bit 8bit": "auto, with model.quantize: nf4 or int8",
        "float32 torch.float32 float fp32_true": "fp32",
    },
    "train.precision": {
        "bfloat16 torch.bfloat16 bf16-mixed bf16-true bf16_mixed mixed true": "bf16",
        "float32 torch.float32 float 32 32-true no false full": "fp32",
        "float16 torch.float16 half 16 16-mixed 16-true": "fp16",
        "float8 8bit": "fp8",
        "int8 4bit int4 nf4": "bf16, with model.quantize: nf4 or int8 for a frozen base",
    },
    "train.device": {
        "gpu cuda:0 cuda:1 gpu:0 nvidia": "cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
        "mps metal xpu npu tpu hpu rocm": "auto, cuda or cpu; other devices are not supported",
    },
    "train.gradient_checkpointing": {
        "true on yes unsloth all": "full",
        "false off no": "none",
        "offload": "full, with train.offload_activations: true",
    },
    "train.max_grad_norm": {"0 0.0 none off": "never"},
    "train.duration": {"-1 0": "N epochs, N steps or N tokens"},
    "train.stop_after": {"-1 0 none": "never"},
    "optimizer.kind": {
        "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fused_adamw torch.optim.adamw torch_adamw "
        "adamw_torch_xla adamw_anyprecision": "adamw",
        EIGHT_BIT_ADAMW: "adamw, with optimizer.state: 8bit",
        PAGED_ADAMW: "adamw, with optimizer.offload: host",
        "adafactor_hf": "adafactor",
        "muon_adamw normuon": "muon",
    },
    "optimizer.state": {"8 8-bit int8 true": "8bit", "32 32bit float32 none false": "fp32"},
    "optimizer.offload": {"cpu true": "host", "false no off": "none"},
    "optimizer.rounding": {"true": "stochastic", "false none": "nearest"},
    "optimizer.lr": {"none default": "auto"},
    "schedule.kind": {
        "constant_with_warmup": "constant",
        "warmup_stable_decay warmup-stable-decay": "wsd",
        "cosine_with_min_lr cosine_warmup cosine_with_warmup get_cosine_schedule_with_warmup": "cosine, with "
        "schedule.min_lr_ratio: 10%",
        "cosine_with_restarts one_cycle onecycle rex": "cosine; restarts and cycles are not supported",
        "polynomial linear_with_warmup": "linear",
        "reduce_lr_on_plateau plateau greedy": "cosine; a rate that follows the loss is not supported",
        "none": "constant, with schedule.warmup: never",
    },
    "schedule.warmup": {"0 0.0 none": "never"},
    "model.kernels": {"unsloth triton fused true": "auto or liger", "none false off": "torch"},
    "model.init": {"scratch from_scratch": "random", "hub checkpoint": "pretrained"},
    "parallel.shard": {
        "zero3 zero-3 zero_3 stage3 fsdp fsdp2 full_shard true": "full",
        "zero2 zero-2 zero_2 stage2 shard_grad_op zero1 stage1": "full, with parallel.reshard_after_forward: false",
        "hybrid_shard hsdp hybrid_shard_zero2": "hybrid",
        "ddp no_shard false off replicate": "none",
    },
    "parallel.processes": {"-1 all gpu": "auto"},
    "method.train_on": {
        "completion completions completion_only answer answers response responses output outputs false": "assistant",
        "last last_turn final": "last_assistant",
        "everything inputs prompt prompts full true both": "all",
    },
    "method.reduction": {"mean tokens": "token", "sample samples sequence": "document", "square": "sqrt"},
    "data.too_long": {
        "keep_start right cut true": "truncate",
        "skip remove filter delete false": "drop",
        "raise error": "drop, which counts them, or truncate",
    },
    "data.on_bad_row": {"ignore drop continue warn": "skip", "raise stop fail": "error"},
    "data.max_length": {"none -1 max": "auto"},
    "data.workers": {"none 0 -1": "auto"},
    "data.train.format": {
        "chat chat_template chatml openai conversation conversational chat_messages": "messages",
        "sharegpt_chat vicuna conversations": "sharegpt",
        "instruction instruct alpaca_chat alpaca:chat": "alpaca",
        "completion_only input_output prompt-completion qa": "prompt_completion",
        "completion raw pretrain plain pretraining": "text",
        "tokenized input_ids": "tokens",
        "jsonl json csv tsv parquet arrow txt": "auto; the kind of file follows from its name, and format is the "
        "form of its records",
        "dpo ranking chosen_rejected kto paired unpaired": "auto; whether a record has preferences follows from "
        "method.kind",
    },
    "eval.every": {
        "epoch epochs": "1 epoch",
        "no none false 0 off": "never",
        "steps": "a number of them, such as 100 steps",
    },
    "eval.samples": {"none false never": "0"},
    "checkpoint.every": {
        "epoch epochs": "1 epoch",
        "no none false 0 off": "never",
        "steps": "a number of them, such as 500 steps",
        "best": "500 steps, with checkpoint.keep_best: eval/loss",
    },
    "checkpoint.keep": {"none -1 all 0": "a large number, such as 1000"},
    "checkpoint.keep_best": {
        "true loss eval_loss eval-loss val_loss validation_loss": "eval/loss",
        "false none no": "null",
        "accuracy eval_accuracy": "eval/loss; other metrics are not supported",
    },
    "export.every": {"epoch epochs": "1 epoch", "no none false 0 off": "never"},
    "export.dtype": {"bfloat16": "bf16", "float32": "fp32", "fp16 float16": "bf16 or fp32; fp16 is not supported"},
    "export.adapter": {"true merged": "merge", "false separate": "keep"},
    "export.base": {
        "bf16 16bit 16-bit full base unquantized unquantised": "original",
        "quantised dequantized dequantised 4bit 4-bit nf4 int8": "quantized",
    },
    "adapter.target_modules": {"all all_linear": "all-linear", "auto none default": "all-linear"},
    "logging.trackers": {
        "none false off": "[]",
        "comet comet_ml neptune swanlab trackio clearml dvclive aim azure_ml": "[tensorboard], [wandb] or [mlflow]; "
        "another one needs a hook of your own",
        "all": "[tensorboard, wandb], those that are wanted",
    },
    "logging.level": {"warn": "warning", "critical fatal passive": "error", "verbose trace detail": "debug"},
}
_REFUSED: dict[str, dict[str, str]] = {
    "method.kind": {_PREFERENCES: "ld_alpha", _REINFORCEMENT: "reward_funcs", "gkd": "gkd"},
    "adapter.kind": {_OTHER_ADAPTERS: "pissa_init"},
    "model.quantize": {_OTHER_BASES: "gptq"},
    "optimizer.kind": {_FEW_BITS: "use_galore"},
    "optimizer.offload": {"nvme disk": "offload_param"},
}
"""Values by our key, each with a key of :mod:`tuner.config.not_supported` that says why not."""


def _by_value() -> dict[str, dict[str, str]]:
    table = {
        key: {value: f"write {text}" for values, text in rows.items() for value in values.split()}
        for key, rows in _WRITE.items()
    }
    table["optimizer.kind"] |= {
        name: f"not supported: {name}; instead write adamw, adafactor or muon, or custom for one of your own"
        for name in _NO_OPTIMIZER.split()
    }
    for key, rows in _REFUSED.items():
        for values, name in rows.items():
            found = absent(name)
            assert found is not None
            table[key] |= dict.fromkeys(values.split(), found.sentence)
    return table


OTHER_VALUES: dict[str, dict[str, str]] = _by_value()
"""Our key -> another tool's value in lower case -> what an error says of it."""


def of_value(key: str, value: object) -> str | None:
    """What to say of a value of one of our keys, items of lists included; None where it is no other tool's."""
    plain = ".".join(part for part in key.split(".") if not part.isdecimal()).replace("data.eval.", "data.train.")
    if not isinstance(value, (str, bool, int, float, type(None))):
        return None
    text = "none" if value is None else str(value).strip().lower()
    known = OTHER_VALUES.get(plain, {})
    return known.get(text.replace(" ", "_").replace("-", "_")) or known.get(text)
