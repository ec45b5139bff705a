"""A tiny ladder: a directory with a model's config, rows of text and the recipe `ladder.yaml`."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.caches import new_cache
from tuner.config.paths import recipes_dir

WORDS = ("the", "rung", "above", "learns", "a", "little", "more", "of", "same", "text", "than", "below")


def ladder_tree(**ladder: Any) -> dict[str, Any]:
    """The recipe: two sizes of one and two layers, 6 and 12 steps of 256 tokens."""
    return {
        "model": {"name_or_path": "./model", "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": "pretrain"},
        "data": {"train": "text.jsonl", "eval": "4 documents", "max_length": 64, "workers": 1, "cache_dir": "cache"},
        "train": {"micro_batch_size": 4, "precision": "fp32", "device": "cpu"},
        "eval": {"every": "never", "at_start": False},
        "checkpoint": {"every": "2 steps", "keep": 1},
        "logging": {"level": "warning"},
        "ladder": {
            "sizes": [
                {"name": "small", "config": {"num_hidden_layers": 1, "hidden_size": 32}},
                {"name": "large", "config": {"num_hidden_layers": 2, "hidden_size": 32}},
            ],
            "tokens": 1536,
            "multiples": [1, 2],
            "decay": "30%",
            "batch_tokens": 256,
            "warmup_tokens": 512,
            **ladder,
        },
    }


def write_ladder_files(directory: Path, **ladder: Any) -> Path:
    """Write the files; the recipe's path."""
    shutil.copytree(recipes_dir() / "models" / "tiny-llama", directory / "model")
    new_cache(directory / "cache")
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=rng.randint(10, 60))) for _ in range(120))
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = directory / "ladder.yaml"
    path.write_text(json.dumps(ladder_tree(**ladder)))
    return path
