"""What `tuner profile --fit` found, kept in the cache for when the same is asked again."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.config.load import recipe_dict
from tuner.config.recipe import Recipe
from tuner.data.encoding.tokenizer_files import local_directory
from tuner.errors import TunerError
from tuner.profile.predict import Target
from tuner.profile.workload import prepared_for
from tuner.runtime.environment import versions
from tuner.runtime.files import hash_of, keep_json, read_json
from tuner.setup.proven import source_hash
from tuner.stages import cache_root

KEPT = "fits"
STEP_BYTES = 128 << 20
CODE = ("config", "model", "parallel", "profile", "setup", "train")
"""Parts of tuner by which it predicts."""


@dataclass(frozen=True)
class KeptAnswer:
    """All that the command says of what it found."""

    table: list[list[str]]
    flags: str
    metrics: dict[str, Any]
    warnings: list[str]
    overrides: dict[str, Any]
    predictions: int
    took_s: float


def key_of(recipe: Recipe, target: Target) -> str:
    """What an answer depends on, in short: recipe, the model's config, prepared rows, target, libraries and tuner."""
    found = prepared_for(recipe, None)
    directory = local_directory(recipe.model.name_or_path)
    config = None if directory is None else directory / "config.json"
    # Memory in whole pieces, so that what is free now and then is the same.
    limits = [None if size is None else size // STEP_BYTES for size in (target.limit_bytes, target.host_limit_bytes)]
    facts = {
        "recipe": {**recipe_dict(recipe), "name": None, "output_dir": None},
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config is not None and config.is_file() else None,
        "data": None if found is None else found[0].key,
        "target": [target.device.shown, asdict(target.rank_info), *limits],
        "versions": versions(),
        "code": source_hash(CODE),
    }
    return hash_of(facts, 16)


def known(key: str, recipe: Recipe) -> KeptAnswer | None:
    """The answer that was kept."""
    with suppress(TunerError, OSError, TypeError):
        return KeptAnswer(**read_json(_path(key, recipe)))
    return None


def keep(key: str, recipe: Recipe, answer: KeptAnswer) -> None:
    """Keep an answer, where the cache can be written."""
    keep_json(_path(key, recipe), asdict(answer))


def _path(key: str, recipe: Recipe) -> Path:
    root = cache_root() if recipe.data.cache_dir is None else Path(recipe.data.cache_dir)
    return root / KEPT / f"{key}.json"
