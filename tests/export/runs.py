"""Run directories as training leaves them, made in a moment from tiny random models."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.fixtures.hashes import frozen_hash
from tests.model.tiny import VOCAB, tiny_config
from tuner.checkpoint.load import read_probe
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.methods import Head
from tuner.export import weights
from tuner.export.verify import last_logits
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model, has_score
from tuner.model.peft_kinds import PeftSpec
from tuner.model.quantize.codes import Kind
from tuner.model.quantize.layers import QuantizeSpec
from tuner.model.root import CausalLM, trained_parameters
from tuner.model.trainable import TrainableSpec
from tuner.runtime.files import file_entries

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
LORA = LoraSpec(4, 8.0, 0.0, "all-linear")
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
    model = build_model(ModelSpec(str(base), head=head, quantize=spec), dtype, seed=0)
    TrainableSpec(lora, left_alone).apply(model, seed=0)
    train_a_little(model, amount)
    section = {"name_or_path": str(base), "dtype": frozen, "config": {}, "freeze": list(left_alone)}
    section |= {} if quantize is None else {"quantize": quantize}
    state = {} if best is None else {"best": {"metric": "eval/loss", "step": best, "value": 1.0}}
    prompts = PROMPTS if probes else []
    quantizing = {} if spec is None else {"quantizer": spec.facts()}
    return save_run(run, base, model, lora, section, prompts, state, facts or {}, quantizing)


def save_run(  # noqa: PLR0913 - what is noted of a run
    run: Path,
    base: Path,
    model: PreTrainedModel,
    lora: LoraSpec | PeftSpec | None,
    section: dict[str, Any],
    prompts: list[list[int]],
    state: dict[str, Any] = {},  # noqa: B006 - nobody changes it
    of_model: dict[str, Any] = {},  # noqa: B006
    notes: dict[str, Any] = {},  # noqa: B006
) -> Path:
    """The run directory of a model that was trained, with one checkpoint, and a tokenizer where it has none yet."""
    writes_text = not has_score(model)
    model.config.save_pretrained(run / "model_config")
    if writes_text:
        model.generation_config.save_pretrained(run / "model_config")
    if not (run / "tokenizer").is_dir():
        write_tokenizer(run / "tokenizer")
    tensors = {f"model/{name}": p.detach().clone() for name, p in trained_parameters(CausalLM(model)).items()}
    first = next(iter(tensors))
    tensors["optimizer/exp_avg/" + first.removeprefix("model/")] = torch.zeros_like(tensors[first])
    seen = {"step": 7, "tokens": 700, "trained_tokens": 300, "epoch": 1.0, "finished": True, "rows_seen": 14}
    facts = checkpoint_facts(run, base, model, lora, section, "sft" if writes_text else "reward") | notes
    facts["model"] |= of_model
    probe = recorded_probe(model, prompts) if prompts else None
    save(CheckpointDir(run / "checkpoints", "test"), 7, tensors, seen | state, facts, probe)
    return run


def checkpoint_facts(  # noqa: PLR0913 - what is noted of a run
    run: Path,
    base: Path,
    model: PreTrainedModel,
    lora: LoraSpec | PeftSpec | None,
    section: dict[str, Any],
    kind: str = "sft",
) -> dict[str, Any]:
    """What a run notes in the manifest of a checkpoint; ``section`` is the recipe's model section."""
    adapter: dict[str, Any] | None = None
    if isinstance(lora, PeftSpec):
        adapter = {"kind": "peft", "config": dict(lora.config)}
    elif lora is not None:
        adapter = {name: value for name, value in vars(lora).items() if name != "use_dora"}
        adapter |= {"kind": "dora" if lora.use_dora else "lora"}
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
        "tokenizer_files": file_entries(run / "tokenizer"),
        "data_key": "1" * 16,
        "data": {"train": {"rows": 12, "tokens": 340, "trained_tokens": 120}},
        "world_size": 1,
        "precision": "fp32",
    }


def recorded_probe(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> dict[str, torch.Tensor]:
    """The probes of a checkpoint: the model's answers to these prompts."""
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return {"input_ids": ids, "lengths": lengths, "logits": last_logits(model, prompts)}


def recorded(run: Path) -> torch.Tensor:
    """The logits that a run's checkpoint has of its probes."""
    return read_probe(open_checkpoint(run / "checkpoints" / "step-7"))["logits"]


def answers(directory: Path) -> torch.Tensor:
    """The last logits of a model that transformers loads of a directory, in float32."""
    return last_logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), PROMPTS)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its path there."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def once(write: Callable[..., Path], factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What makes a run with its base in a place of its own, once for the same arguments."""
    return functools.cache(lambda *how: write(factory.mktemp("run"), *how))


def copied(run: Path, place: Path) -> Path:
    """A copy of a run and of its base, which a test may change; the run knows the base that it had."""
    shutil.copytree(run.parent, place, dirs_exist_ok=True)
    return place / "run"


def without_the_base_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an export fail that loads the base model."""

    def build(source: object) -> None:
        raise AssertionError("the base model is loaded")

    monkeypatch.setattr(weights, "base_model", build)
