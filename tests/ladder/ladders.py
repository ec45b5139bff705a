"""A tiny ladder: a directory with a model's config, rows of text and the recipe `ladder.yaml`."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.caches import new_cache
from tuner.config.paths import recipes_dir

WORDS = ("the", "rung", "above", "learns", "a", "little", "more", "of", "same", "text", "than", "below")


def ladder_tree(**ladder: Any) -> dict[str, Any]:
    """The recipe of `ladder.yaml` beside this file, with keys of its ladder replaced."""
    tree = dict(YAML(typ="safe").load(Path(__file__).with_name("ladder.yaml")))
    tree["ladder"] |= ladder
    return tree


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
