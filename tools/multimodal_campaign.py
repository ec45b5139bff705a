"""The language models of tiny multimodal checkpoints, of every type that transformers has: trained, and put back.

    python tools/multimodal_campaign.py [--only TYPE ...] [--table FILE]

For each type a tiny whole model is saved with random weights in several files. Its language model is trained, in full
and by an adapter, and exported into the whole checkpoint, which is held against the source by code of its own: what is
no part of the language model must have its bytes, and the loss of the first step must be that of the whole model. A
type is `equal`, `refused` with a reason, or `impossible` where transformers itself does not run its text. Exits with 1
where one is wrong, or where a run ended with anything but a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils import logging

from tools.causal_cases import tiny_config
from tuner.api import export_hf
from tuner.config.load import load_recipe
from tuner.config.overrides import Override
from tuner.errors import TunerError
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
EQUAL = 1e-5
"""Of the loss, relative, in float32."""


def whole_model(model_type: str) -> PreTrainedModel:
    """A tiny whole model of a type, whose weights are random. Raises what its classes raise."""
    config = tiny_config(model_type)
    for part in parts_of(config):
        if hasattr(part, "vocab_size"):
            part.vocab_size = VOCABULARY
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
    modes = {mode: one(directory, mode, model) for mode in MODES}
    verdicts = {mode["verdict"] for mode in modes.values()}
    worst = next(each for each in ("wrong", "exit 1", "refused", "equal") if each in verdicts)
    return {"type": model_type, "verdict": worst, "reason": modes["full"]["reason"], "modes": modes}


def one(directory: Path, mode: str, model: PreTrainedModel) -> dict[str, Any]:
    """Train and export in one mode; the verdict, and what is wrong."""
    overrides = [Override(key, value) for key, value in {**MODES[mode], "name": mode}.items()]
    try:
        loaded = load_recipe(directory / "r.yaml", overrides, cwd=directory)
        result = train(loaded, LaunchOptions(), RankInfo(), Console(main=False))
        exported = export_hf(result.run_dir, dtype="fp32").path
        kept = export_hf(result.run_dir, adapter="keep", dtype="fp32").path if mode == "lora" else None
    except TunerError as error:
        return {"verdict": "refused", "reason": str(error)}
    except Exception as error:
        return {"verdict": "exit 1", "reason": f"{type(error).__name__}: {first_line(error)}"}
    wrong = wrong_with(directory / "whole", exported, model)
    loss = json.loads((Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()[0]).get("loss")
    return {"verdict": "wrong" if wrong else "equal", "reason": wrong, "loss": loss, "kept": str(kept)}


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


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def first_line(error: BaseException) -> str:
    """What an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def main() -> int:
    """Try the types that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE")
    parser.add_argument("--table", type=Path, help="write what was found as JSON")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    found = []
    for model_type in options.only:
        with tempfile.TemporaryDirectory() as directory:
            found.append(tried(model_type, Path(directory)))
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
