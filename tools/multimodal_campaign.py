"""The language models of tiny multimodal checkpoints, of every type that transformers has: trained, and put back.

    python -m tools.multimodal_campaign [--only TYPE ...] [--table FILE]

For each type a tiny whole model is saved with random weights in several files. Its language model is trained, in full
and by an adapter, and exported into the whole checkpoint, which is compared with the source by code of its own: what is
no part of the language model must have its bytes, and the whole class, with all its parts, must answer as what was
trained. A type is `equal`, `refused` with a reason, or `impossible` where transformers itself does not run its text.
Exits with 1 where one is wrong, or where a run ended with anything but a reason.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.models.qwen2 import Qwen2Tokenizer

from tools.causal_cases import quiet, tiny_config
from tools.commands import asked, some, workplace
from tuner.api.exports import export_hf
from tuner.config.load import Override, load_recipe
from tuner.errors import TunerError, first_line
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

TYPES = tuple(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
MODES = {"full": {}, "lora": {"adapter.kind": "lora"}}
VOCABULARY = 300
STEPS = 3
RECIPE = """\
model: {name_or_path: ./whole}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 48, shuffle: false}
train: {duration: 3 steps, global_batch_size: 2, micro_batch_size: 1, precision: fp32, device: cpu}
optimizer: {lr: 1e-2}
checkpoint: {every: 1 epochs}
eval: {samples: 0}
logging: {level: error}
"""
EQUAL = 1e-4
"""Largest difference of logits, as a share of the largest, in float32."""


def whole_model(model_type: str) -> PreTrainedModel:
    """A tiny whole model of a type, whose weights are random. Raises what its classes raise."""
    config = tiny_config(model_type)
    for part in parts_of(config):
        for key in ("vocab_size", "vocab_size_per_layer_input"):
            if getattr(part, key, None):
                setattr(part, key, VOCABULARY)
        turned = getattr(part, "rope_parameters", None)
        if turned and "rope_type" in turned and (part.model_type.startswith("glm") or "vl" in part.model_type):
            turned["mrope_section"] = [2, 1, 1]
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05, mean=1.0 if "norm" in name and parameter.ndim == 1 else 0.0)
    return model.eval()


def parts_of(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A config and those in it."""
    inner = [getattr(config, key, None) for key in config.sub_configs]
    return [config, *(part for each in inner if each is not None for part in parts_of(each))]


def tried(model_type: str, directory: Path) -> dict[str, Any]:
    """What becomes of a type: a verdict, and how each mode ended."""
    try:
        model = whole_model(model_type)
        with torch.no_grad():
            assert model(input_ids=torch.arange(5, 12)[None], use_cache=False).logits.isfinite().all()
        model.save_pretrained(directory / "whole", max_shard_size="100KB")
    except Exception as error:  # of transformers' own classes
        return {"type": model_type, "verdict": "impossible", "reason": first_line(error), "modes": {}}
    rows = [{"text": "abcdefgh" * (1 + i % 5)} for i in range(8)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "r.yaml").write_text(RECIPE + "method: {kind: pretrain}\n")
    write_tokenizer(directory / "whole")
    modes = {mode: one(directory, mode, model) for mode in MODES}
    verdicts = {mode["verdict"] for mode in modes.values()}
    worst = next(each for each in ("wrong", "exit 1", "refused", "equal") if each in verdicts)
    return {"type": model_type, "verdict": worst, "reason": modes["full"]["reason"], "modes": modes}


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes of a class of its own, for types that load no other class."""
    symbols = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_end|>"]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.save_pretrained(directory)


def one(
    directory: Path, mode: str, model: PreTrainedModel, tokenizer: str = "byte", packing: str = "true"
) -> dict[str, Any]:
    """Train and export in one mode; the verdict, and what is wrong."""
    keys = {**MODES[mode], "name": mode, "tokenizer.name_or_path": tokenizer, "data.packing": packing}
    overrides = [Override(key, value) for key, value in keys.items()]
    try:
        loaded = load_recipe(directory / "r.yaml", overrides, cwd=directory)
        result = train(loaded, LaunchOptions(), RankInfo(), Console(main=False))
        exported = export_hf(result.run_dir, dtype="fp32").path
        kept = export_hf(result.run_dir, adapter="keep", dtype="fp32").path if mode == "lora" else None
    except TunerError as error:
        if tokenizer == "byte" and "as its readers would load it" in str(error):
            return one(directory, mode, model, "./whole", packing)
        if packing == "true" and "on packed rows" in str(error):
            return one(directory, mode, model, tokenizer, "false")
        return {"verdict": "refused", "reason": str(error)}
    except Exception as error:
        return {"verdict": "exit 1", "reason": f"{type(error).__name__}: {first_line(error)}"}
    wrong = wrong_with(directory / "whole", exported, model)
    wrong = wrong or ("" if kept is None else answers_differ(directory, exported, kept))
    return {"verdict": "wrong" if wrong else "equal", "reason": wrong}


def wrong_with(source: Path, exported: Path, model: PreTrainedModel) -> str:
    """What is wrong with an export, by its files and by the whole class; empty where nothing is."""
    before, after = tensors(source), tensors(exported)
    if before.keys() != after.keys():
        return f"other tensors: {sorted(before.keys() ^ after.keys())[:3]}"
    decoder = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    language = sum(p.numel() for p in model.parameters() if id(p) in decoder)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    if not changed:
        return "nothing was trained"
    count = sum(before[name].numel() for name in changed)
    if count > language:
        return f"{count} numbers changed, the language model has {language}"
    return ""


@torch.no_grad()
def answers_differ(directory: Path, exported: Path, kept: Path) -> str:
    """How an adapter on the whole source answers otherwise than the export it was merged into; empty where alike."""
    merged = AutoModelForMultimodalLM.from_pretrained(exported, dtype=torch.float32).eval()
    base = AutoModelForMultimodalLM.from_pretrained(directory / "whole", dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, str(kept)).eval()
    ids = torch.arange(5, 30)[None]
    one, other = (model(input_ids=ids, use_cache=False).logits for model in (merged, adapted))
    difference = float((one - other).abs().max() / one.abs().max())
    return "" if difference <= EQUAL else f"the adapter on the whole model differs by {difference:.1e}"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


@quiet()
def main() -> int:
    """Try the types that were asked for."""
    options = asked(__doc__, only=some(TYPES), table=(Path, "write what was found as JSON"))
    found = []
    for model_type in options.only:
        with workplace() as directory:
            found.append(tried(model_type, directory))
        print(f"{model_type:28} {found[-1]['verdict']:10} {found[-1]['reason'][:150]}", flush=True)
    if options.table:
        options.table.write_text(json.dumps(found, indent=1))
    counts = {
        verdict: sum(each["verdict"] == verdict for each in found) for verdict in ("equal", "refused", "impossible")
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if sum(counts.values()) < len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
