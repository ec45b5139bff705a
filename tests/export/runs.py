"""Run directories as training leaves them, made in a moment from tiny random models."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.model.tiny import VOCAB, tiny_config
from tuner.checkpoint.load import read_probe
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.methods import Head
from tuner.export.verify import last_logits
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.freeze import freeze, frozen_hash
from tuner.model.peft_kinds import PeftSpec, add_peft
from tuner.model.quantize.codes import Kind
from tuner.model.quantize.layers import QuantizeSpec
from tuner.model.quantize.reading import ReadingQuantizer
from tuner.model.root import CausalLM, trained_parameters
from tuner.runtime.files import file_entries

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(20, 45))]


def write_base(directory: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A base model directory with a word tokenizer and a chat template."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, size: int = VOCAB) -> None:
    names = ["<pad>", "<s>", "</s>", "<|end|>", "assistant", "user"]
    words = names + [f"w{i}" for i in range(len(names), size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<s>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def train_a_little(model: PreTrainedModel, amount: float) -> None:
    """Move every trained parameter as training would, by a seeded step of this size."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in sorted(trained_parameters(CausalLM(model)).items()):
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))


def write_run(  # noqa: PLR0913 - what a run can be
    run: Path,
    base: Path,
    lora: LoraSpec | PeftSpec | None = None,
    probes: bool = True,
    frozen: str = "fp32",
    left_alone: tuple[str, ...] = (),
    amount: float = 0.05,
    facts: dict[str, Any] | None = None,
    best: int | None = None,
    head: Head = "tokens",
    quantize: Kind | None = None,
) -> Path:
    """A run directory with one checkpoint at step 7, saved by the product's own writer; `best` is noted in it."""
    dtype = torch.bfloat16 if frozen == "bf16" else torch.float32
    spec = None if quantize is None else QuantizeSpec(quantize, () if lora is None else lora.modules_to_save)
    quantizer = None if spec is None else ReadingQuantizer(spec)
    model = build_model(ModelSpec(str(base), head=head, quantize=quantizer), dtype, seed=0)
    model.config.save_pretrained(run / "model_config")
    if head == "tokens":
        model.generation_config.save_pretrained(run / "model_config")
    write_tokenizer(run / "tokenizer")
    if isinstance(lora, PeftSpec):
        add_peft(model, lora, seed=0)
    elif lora is not None:
        add_lora(model, lora, seed=0)
    if left_alone:
        freeze(model, left_alone)
    train_a_little(model, amount)
    tensors = {f"model/{name}": p.detach() for name, p in trained_parameters(CausalLM(model)).items()}
    first = next(iter(tensors))
    tensors["optimizer/exp_avg/" + first.removeprefix("model/")] = torch.zeros_like(tensors[first])
    save(
        CheckpointDir(run / "checkpoints", "test"),
        7,
        tensors,
        {"step": 7, "tokens": 700, "trained_tokens": 300, "epoch": 1.0, "finished": True, "rows_seen": 14}
        | ({} if best is None else {"best": {"metric": "eval/loss", "step": best, "value": 1.0}}),
        checkpoint_facts(
            base,
            model,
            lora,
            {"name_or_path": str(base), "dtype": frozen, "config": {}, "freeze": list(left_alone)}
            | ({} if quantize is None else {"quantize": quantize}),
            "reward" if head == "score" else "sft",
        )
        | {"tokenizer_files": file_entries(run / "tokenizer")}
        | ({} if spec is None else {"quantizer": spec.facts()})
        | ({"model": {"name_or_path": str(base), "revision": None, "init": "pretrained", **facts}} if facts else {}),
        recorded_probe(model) if probes else None,
    )
    return run


def checkpoint_facts(
    base: Path, model: PreTrainedModel, lora: LoraSpec | PeftSpec | None, section: dict[str, Any], kind: str = "sft"
) -> dict[str, Any]:
    """What a run notes in the manifest of a checkpoint; ``section`` is the recipe's model section."""
    adapter: dict[str, Any] | None = None
    if isinstance(lora, PeftSpec):
        adapter = {"kind": "peft", "config": dict(lora.config)}
    elif lora is not None:
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        adapter = {
            "kind": "dora" if lora.use_dora else "lora",
            "r": lora.r,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
            "target_modules": targets,
            "use_rslora": lora.use_rslora,
            "modules_to_save": list(lora.modules_to_save),
            "experts": lora.experts,
        }
    return {
        "recipe": {
            "name": "tiny",
            "seed": 0,
            "model": section,
            "method": {"kind": kind},
            "optimizer": {"kind": "custom", "use": f"{base.parent}/own.py:Mine", "lr": 0.001},
            "logging": {"project": "s3cret"},
            "hooks": [{"use": "hook.py:Tell", "options": {"token": "s3cret"}}],
        },
        "model": {
            "name_or_path": str(base),
            "revision": None,
            "init": "pretrained",
            "config": model.config.to_dict(),
            "n_parameters": sum(p.numel() for p in model.parameters()),
        },
        "adapter": adapter,
        "frozen_hash": frozen_hash(model),
        "tokenizer_hash": "0" * 64,
        "data_key": "1" * 16,
        "data": {"train": {"rows": 12, "tokens": 340, "trained_tokens": 120}},
        "world_size": 1,
        "precision": "fp32",
    }


def recorded_probe(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> dict[str, torch.Tensor]:
    """The probes of a checkpoint: the model's answers to these prompts."""
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    frozen = {p: p.dtype for p in model.parameters()}
    for parameter in frozen:
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    logits = last_logits(model, prompts)
    return {"input_ids": ids, "lengths": torch.tensor(lengths), "logits": logits}


def recorded(run: Path) -> torch.Tensor:
    """The logits that a run's checkpoint has of its probes."""
    return read_probe(open_checkpoint(run / "checkpoints" / "step-7"))["logits"]
