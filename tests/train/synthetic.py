"""Prepared data made in memory, with trained-token counts as uneven as a test wants them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fixtures.rows import InMemory
from tests.model.tiny import VOCAB, tiny_config
from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import open_checkpoint
from tuner.config.load import load_recipe
from tuner.config.recipe import Recipe
from tuner.data.prepared import PreparedData, Row
from tuner.model.build import ModelSpec, build_model
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, build, run_tensors
from tuner.setup.resolve import resolve
from tuner.train.step import optimizer_step

MAX_LENGTH = 32


class SyntheticRows(InMemory):
    """Rows of two random documents, of which `trained[i]` tokens of row i are trained: 21 of the first, then others."""

    max_length, is_large = MAX_LENGTH, False

    def __init__(self, trained: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.trained_per_row = np.array(trained, dtype=np.int64)
        self.tokens_per_row = np.full(len(trained), MAX_LENGTH, dtype=np.int64)
        self.documents_per_row = np.full(len(trained), 2, dtype=np.int64)
        self.squares_per_row = np.full(len(trained), (MAX_LENGTH - 10) ** 2 + 10**2, dtype=np.int64)
        self._ids = rng.integers(3, VOCAB, (len(trained), MAX_LENGTH))

    def __len__(self) -> int:
        return len(self.trained_per_row)

    def row(self, i: int) -> Row:
        trained = np.zeros(MAX_LENGTH, dtype=np.bool_)
        count, second = int(self.trained_per_row[i]), MAX_LENGTH - 10
        trained[1 : min(1 + count, second)] = True
        trained[second + 1 : second + 1 + max(0, count - (second - 1))] = True
        lengths = np.array([second, 10], dtype=np.int32)
        return Row(self._ids[i].astype(np.int64), trained, lengths, np.array([2 * i, 2 * i + 1]))


class UnpackedRows(InMemory):
    """The documents of `SyntheticRows`, each in a row of its own."""

    max_length, is_large = MAX_LENGTH, False

    def __init__(self, packed: SyntheticRows) -> None:
        rows = [packed.row(i) for i in range(len(packed))]
        self._rows = [row for whole in rows for row in _documents(whole)]
        self.tokens_per_row = np.array([len(row.input_ids) for row in self._rows], dtype=np.int64)
        self.trained_per_row = np.array([int(row.trained.sum()) for row in self._rows], dtype=np.int64)
        self.documents_per_row = np.ones(len(self._rows), dtype=np.int64)
        self.squares_per_row = self.tokens_per_row**2

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> Row:
        return self._rows[i]


def _documents(row: Row) -> list[Row]:
    ends = np.cumsum(row.lengths)
    found = []
    for end, length, document in zip(ends, row.lengths, row.documents, strict=True):
        part = slice(end - length, end)
        found.append(Row(row.input_ids[part], row.trained[part], np.array([length]), np.array([document])))
    return found


class NoTokenizer:
    vocab_size = VOCAB
    eos_ids = (2,)
    hash = "none"


def write_model(directory: Path, kind: str = "llama-tied", vocabulary: int = VOCAB) -> None:
    """A tiny pretrained model directory with weights, of at least as many embeddings as there are tokens."""
    config = tiny_config(kind)
    config.vocab_size = vocabulary
    config.save_pretrained(directory)
    build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=5).save_pretrained(directory)


def recipe_for(model_dir: Path, **sections: dict[str, Any]) -> Recipe:
    (model_dir / "rows.jsonl").touch()
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(model_dir)}, "data": {"train": str(model_dir / "rows.jsonl")},
        "train": {"device": "cpu", "precision": "fp32", "duration": "20 steps"}, "optimizer": {"lr": 1e-3},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return load_recipe(tree).recipe


def assembly_for(
    recipe: Recipe, trained: list[int], rank_info: RankInfo, packed: bool = True, new_ids: range = range(0)
) -> Assembly:
    rows: Any = SyntheticRows(trained) if packed else UnpackedRows(SyntheticRows(trained))
    prepared = PreparedData(Path("/none"), "key", {}, rows, None, [])
    tokenizer: Any = NoTokenizer()
    return build(resolve(recipe, MAX_LENGTH, rank_info, new_ids), prepared, tokenizer, rank_info)


def taken(assembly: Assembly, steps: range) -> list[float]:
    """The losses of real steps."""
    return [optimizer_step(assembly.train_state, i, assembly.batches.step(i), 1.0).read().loss for i in steps]


def resume(assembly: Assembly, source: Path, step: int) -> None:
    """Have a run go on from a checkpoint of a step. Collective."""
    load_into(open_checkpoint(source), run_tensors(assembly.train_state))
    assembly.train_state.optimizer.set_step_count(step)


def draw_lora_b(parameters: Mapping[str, torch.Tensor], std: float = 0.1) -> None:
    """Draw what is zero in a fresh adapter, which adds nothing then."""
    for name, parameter in parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(0, std)
