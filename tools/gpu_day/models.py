"""Models of published shapes with random weights, rows of uneven documents, and recipes of a user's first run."""

import json
import random
from pathlib import Path
from typing import Any

from tools.gpu_day.record import Day

QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        **QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Qwen3's."""
SMALL = {
    "vocab_size": 320, "head_dim": 16, "num_key_value_heads": 2, "max_position_embeddings": 512, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
END = 2


def config_of(day: Day, size: str, layers: int | None = None) -> Any:
    """The config of a model of this size, tiny where the day is; of so many layers."""
    from transformers.models.qwen3 import Qwen3Config

    shape = SMALL if day.small else SHAPES[size]
    config = Qwen3Config(**shape, bos_token_id=1, eos_token_id=END, pad_token_id=0, architectures=["Qwen3ForCausalLM"])
    if layers is not None and not day.small:
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:layers]
    return config


def write_config(day: Day, size: str) -> Path:
    """A directory with the config alone: `model.init: random` draws the weights."""
    place = day.work / f"model-{size}"
    if not place.is_dir():
        config_of(day, size).save_pretrained(place)
    return place


def write_documents(day: Day) -> Path:
    """Text of log-normal lengths, 700 tokens of one byte each on average, as a file of rows."""
    path = day.work / "documents.jsonl"
    if path.is_file():
        return path
    draw = random.Random(0)
    words = [str(draw.randrange(10**6)) for _ in range(5000)]
    count, scale = (40, 1.5) if day.small else (6000, 4.6)
    with path.open("w", encoding="utf-8") as rows:
        for _ in range(count):
            text = " ".join(draw.choices(words, k=max(5, int(draw.lognormvariate(scale, 1)))))
            rows.write(json.dumps({"text": text[:16000]}) + "\n")
    return path


def write_recipe(day: Day, size: str, adapter: str = "none") -> Path:
    """A recipe that says what it must: model, data, duration. All else is what a user gets without asking."""
    path = day.work / f"{size}-{adapter}.yaml"
    rows, length, steps = (4, 64, 4) if day.small else (16, 4096, 40)
    recipe = {
        "model": {"name_or_path": str(write_config(day, size)), "init": "random"},
        "tokenizer": {"name_or_path": "byte"}, "adapter": {"kind": adapter}, "method": {"kind": "pretrain"},
        "data": {"train": str(write_documents(day)), "eval": "1 document", "max_length": length},
        "train": {"global_batch_size": rows, "duration": f"{steps} steps", "device": day.device},
        "eval": {"max_rows": 8}, "output_dir": str(day.work / f"run-{size}-{adapter}"),
    }
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path
