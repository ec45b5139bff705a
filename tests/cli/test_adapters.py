"""The real commands with every kind of adapter and with frozen parts: train, export merged and as an adapter."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.caches import new_cache
from tests.fixtures import forked, trainings
from tuner.checkpoint.open import newest

ROOT = Path(__file__).resolve().parents[2]
# Several command lines in one process, each as a shell would give it: what counts here is not the start.
LINES = """
import json, sys
from tuner.cli.main import run
for line in json.loads(sys.argv[1]):
    try:
        code = run(line)
    except SystemExit as end:
        code = end.code
    if code:
        sys.exit(code)
"""
WISHES: dict[str, dict[str, Any]] = {
    "rslora": {"adapter": {"kind": "lora", "r": 4, "use_rslora": True, "dropout": 0.1}},
    "dora": {"adapter": {"kind": "dora", "r": 4, "dropout": 0.1}, "train": {"precision": "bf16"}},
    "saved": {
        "adapter": {
            "kind": "lora",
            "r": 4,
            "target_modules": ["model.layers.*.self_attn.*_proj"],
            "modules_to_save": ["lm_head", "layers.1.mlp"],
        },
        "train": {
            "precision": "bf16",
            "gradient_checkpointing": "full",
            "gradient_checkpointing_layers": "50%",
        },
    },
    # The model has 300 rows and the tokenizer 259 ids: most tokens find a row, for the last ones four are added.
    "tokens": {
        "adapter": {"kind": "lora", "r": 4},
        "tokenizer": {"name_or_path": "byte", "add_tokens": ["ab" * n for n in range(1, 46)]},
        "train": {"precision": "bf16"},
    },
    "frozen": {"adapter": {"kind": "none"}, "model": {"freeze": ["embed_tokens", "*.0.*"]}},
}
TRAINED = {
    "rslora": {".lora_A.default.weight", ".lora_B.default.weight"},
    "dora": {".lora_A.default.weight", ".lora_B.default.weight", ".lora_magnitude_vector.default.weight"},
    "saved": {".lora_A.default.weight", ".lora_B.default.weight", "embed_tokens.weight", "layers.1.mlp."},
    "tokens": {".lora_A.default.weight", ".lora_B.default.weight", "model.embed_tokens.new_rows"},
    "frozen": {"model.layers.1.", "model.norm.weight"},
}


def write_recipe(directory: Path, name: str, wish: dict[str, Any]) -> str:
    recipe: dict[str, Any] = {
        "name": name,
        "tokenizer": {"name_or_path": "byte"},
        "data": {"train": "rows.jsonl", "max_length": 64},
        "optimizer": {"lr": 1e-2},
        "logging": {"level": "warning"},
        **wish,
    }
    recipe["model"] = {"name_or_path": "./model", **wish.get("model", {})}
    train = {"duration": "2 steps", "global_batch_size": 4, "precision": "fp32", "device": "cpu"}
    recipe["train"] = {**train, **wish.get("train", {})}
    (directory / f"{name}.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return f"{name}.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every wish was trained for two steps and exported in each form."""
    directory = tmp_path_factory.mktemp("adapters")
    trainings.prepare(directory, 1)
    lines = []
    for name, wish in WISHES.items():
        lines += [["train", write_recipe(directory, name, wish)], ["export-hf", f"runs/{name}", "--dtype", "fp32"]]
        if name != "frozen":
            lines += [["export-hf", f"runs/{name}", "--adapter", "keep", "--output", f"kept/{name}"]]
    lines.append(["verify-resume", "runs/tokens", "--steps", "1"])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TUNER_CACHE": str(new_cache(directory / "c")),
    }
    command = [sys.executable, "-c", LINES, json.dumps(lines)]
    done = forked.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", WISHES)
def test_only_what_is_trained_is_in_the_checkpoint(name: str, trained: Path) -> None:
    found = newest(trained / "runs" / name / "checkpoints")
    assert found is not None
    names = [key.removeprefix("model/") for key in found.index() if key.startswith("model/")]
    assert names
    assert not [key for key in names if not any(part in key for part in TRAINED[name])]
    assert all(any(part in key for key in names) for part in TRAINED[name])
    moments = {key.split("/", 2)[2] for key in found.index() if key.startswith("optimizer/")}
    assert moments == set(names), "the optimizer holds nothing of what is frozen"


@pytest.mark.slow
@pytest.mark.parametrize("name", WISHES)
def test_the_exports_are_whole(name: str, trained: Path) -> None:
    (export,) = (trained / "runs" / name / "exports").iterdir()
    before = set(load_file(trained / "model" / "model.safetensors"))
    assert set(load_file(export / "model.safetensors")) == before
    if name != "frozen":
        facts = json.loads((trained / "kept" / name / "adapter_config.json").read_text())
        assert facts["use_dora"] == (name == "dora")
        assert facts["use_rslora"] == (name == "rslora")
        assert facts["modules_to_save"] == (["lm_head", "model.layers.1.mlp"] if name == "saved" else None)


@pytest.mark.slow
def test_tokens_of_the_recipe_are_in_the_exports(trained: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (merged,) = (trained / "runs" / "tokens" / "exports").iterdir()
    rows, before = (load_file(place / "model.safetensors") for place in (merged, trained / "model"))
    embeddings, old = rows["model.embed_tokens.weight"], before["model.embed_tokens.weight"]
    assert embeddings.shape == (304, 32)
    assert torch.equal(embeddings[:259], old[:259].bfloat16().float())
    assert not (embeddings[259:] == old[:259].mean(0)).all(1).any()
    tokenizer = AutoTokenizer.from_pretrained(merged)
    prompt = tokenizer("7 ababab", return_tensors="pt")
    assert prompt["input_ids"].max() >= 259
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    base.resize_token_embeddings(304)
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(**prompt).logits
        away = (base(**prompt).logits - expected).abs().max()
        adapted = PeftModel.from_pretrained(base, trained / "kept" / "tokens")
        assert (adapted(**prompt).logits - expected).abs().max() < 5e-3 < 0.1 * away  # it is written in bf16
