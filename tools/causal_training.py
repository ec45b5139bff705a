"""The other side of the campaign of causal types: a model as `tuner train` builds, trains, decodes and exports it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tools.causal_cases import VOCAB
from tools.causal_faults import planted
from tools.causal_plain import ADAPTER_RATE, ALPHA, CLIPPED, OPTIMIZER, RANK, RATE, SEED
from tools.causal_rows import LAYOUTS, LENGTHS, STEPS, documents
from tuner.api.exports import export_hf
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.load import load_recipe, recipe_dict
from tuner.model.adapter import lora_layers
from tuner.model.decode import greedy
from tuner.model.flops import training_flops
from tuner.run.state import write_model_config
from tuner.rundir.layout import CHECKPOINTS, MODEL_CONFIG, TOKENIZER
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import file_entries
from tuner.setup.build import build_train_state, run_tensors
from tuner.setup.model import load_training_model
from tuner.setup.probes import record_probes
from tuner.setup.resolve import Resolved, resolve
from tuner.train.step import forward_backward, optimizer_step

LONGEST = 64
ADAPTER = {"adapter.kind": "lora", "adapter.r": RANK, "adapter.alpha": ALPHA, "optimizer.lr": ADAPTER_RATE}
PROMPTS, NEW_TOKENS = ((5, 6, 7, 8), (9, 10), tuple(range(11, 23))), 6


@dataclass(frozen=True)
class Mode:
    """How a type is trained: its layout of documents, for how many steps, and with which keys of the recipe."""

    layout: str
    steps: int = STEPS
    keys: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, directory: Path) -> dict[str, Any]:
        """The recipe of a model's directory, as a tree of sections."""
        layout = LAYOUTS[self.layout]
        given = {
            "model.name_or_path": str(directory), "tokenizer.name_or_path": "byte",
            "data.train": [{"path": "rows.jsonl"}], "data.max_length": LONGEST,
            "data.packing": "auto" if layout.packing else False,
            "train.precision": "fp32", "train.device": "cpu", "train.duration": f"{STEPS} steps",
            "train.global_batch_size": 6, "train.micro_batch_size": layout.micro, "train.max_grad_norm": CLIPPED,
            "optimizer.lr": RATE, "output_dir": str(directory / "runs"), "seed": SEED,
            **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()}, **self.keys,
        }  # fmt: skip
        return tree_of(given)


class Training:
    """One training of a model: built, and after :meth:`train` with its losses and the gradients of its first step.

    ``held`` keeps the model in evaluation mode, for one that draws random numbers which documents in one forward get
    others of.
    """

    def __init__(self, directory: Path, mode: Mode, held: bool = False, rank_info: RankInfo | None = None) -> None:
        rank_info = rank_info or RankInfo()
        self.mode, self._rank_info = mode, rank_info
        recipe = load_recipe(mode.recipe(directory)).recipe
        self.resolved: Resolved = resolve(recipe, int(recipe.data.max_length), rank_info)
        (root, self.facts), step_config = load_training_model(self.resolved, rank_info)
        self.state = build_train_state(self.resolved, root, step_config)
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        training_flops(self.state.root.model)
        if held:
            root = self.state.root
            root.train = lambda mode=True: nn.Module.train(root, False)  # type: ignore[method-assign]
        self.firsts = {
            name: layer.lora_A["default"].weight.detach().clone() for name, layer in lora_layers(self.state.root.model)
        }
        """The first matrices of the adapters as they were drawn, by the name of their layer."""

    @property
    def route(self) -> str:
        """How the documents of packed rows go through the model."""
        return self.state.root.layout.route

    def train(self, fault: str = "") -> Training:
        """Take the steps, with a fault planted in them where one is named; the training itself."""
        rank, processes = self._rank_info.rank, self._rank_info.world_size
        layout = LAYOUTS[self.mode.layout]
        with planted(fault, self.state.root):
            if processes == 1:
                forward_backward(self.state, 0, layout.batches(0))
                found = ((name, p.grad) for name, p in self.state.root.model.named_parameters())
                self.gradients = {name: grad.detach().double() for name, grad in found if grad is not None}
                self.state.optimizer.zero_grad()
            for step in range(self.mode.steps):
                scalars = optimizer_step(self.state, step, layout.batches(step, rank, processes), 1.0)
                self.losses.append(scalars.read().loss)
        return self

    @torch.no_grad()
    def logits(self) -> list[torch.Tensor]:
        """Of the documents of the first step, each alone, as the model is now."""
        root = self.state.root.eval()
        given = [torch.tensor(ids) for ids in documents()]
        return [root.logits(ids, torch.arange(len(ids)), (len(ids),), torch.arange(len(ids))) for ids in given]

    @torch.no_grad()
    def moved_by_later(self) -> float:
        """How far a change of the later half of each document moves the logits before it, relative to their spread."""
        root = self.state.root.eval()
        ids = [torch.tensor(row) for row in documents()]
        worst = 0.0
        for chosen in [[i] for i in range(len(ids))] if self.mode.layout == "single" else [range(len(ids))]:
            row = torch.cat([ids[i] for i in chosen])
            lengths = tuple(len(ids[i]) for i in chosen)
            positions = torch.cat([torch.arange(length) for length in lengths])
            before = root.logits(row, positions, lengths, torch.arange(len(row)))
            start = 0
            for length in lengths:
                changed, middle = row.clone(), start + length // 2
                changed[middle : start + length] = (changed[middle : start + length] - 3 + 1) % (VOCAB - 3) + 3
                after = root.logits(changed, positions, lengths, torch.arange(len(row)))
                outside = torch.ones(len(row), dtype=torch.bool)
                outside[middle : start + length] = False
                spread = (before - before.mean(-1, keepdim=True)).norm().clamp_min(1e-12)
                worst = max(worst, float((after - before)[outside].norm() / spread))
                start += length
        return worst

    def answers(self) -> list[list[int]]:
        """Greedy answers to the prompts, all of them at once, as sample answers are decoded."""
        return greedy(self.state.root.eval(), PROMPTS, (), [NEW_TOKENS] * len(PROMPTS), torch.device("cpu"))

    def export(self, directory: Path) -> Path:
        """Save a checkpoint in a run's directory and export it in float32 by the product's own command.

        Adapters are merged. Raises what the export raises.
        """
        root, recipe, run = self.state.root, self.resolved.recipe, directory / "run"
        write_model_config(run / MODEL_CONFIG, self.resolved)
        _write_words(run / TOKENIZER)
        model = {
            "name_or_path": recipe.model.name_or_path, "revision": None, "init": "pretrained",
            "config": json.loads(root.model.config.to_json_string(use_diff=False)),
            "n_parameters": self.resolved.n_parameters, "new_ids": [0, 0],
            **({} if self.facts.untouched is None else {"untouched": self.facts.untouched}),
        }  # fmt: skip
        facts = {
            "recipe": recipe_dict(recipe), "model": model, "frozen_hash": self.facts.frozen_hash(), "world_size": 1,
            "adapter": None if recipe.adapter.kind == "none" else recipe_dict(recipe)["adapter"],
            "tokenizer_hash": "0" * 64, "data_key": "1" * 16, "precision": "fp32",
            "data": {"train": {"rows": STEPS, "tokens": STEPS * sum(LENGTHS), "trained_tokens": 0}},
            "tokenizer_files": file_entries(run / TOKENIZER),
        }  # fmt: skip
        seen = {"step": STEPS, "tokens": 0, "trained_tokens": 0, "epoch": 1.0, "finished": True, "rows_seen": STEPS}
        probes = record_probes(root, [torch.tensor(ids) for ids in documents()], torch.device("cpu"))
        save(CheckpointDir(run / CHECKPOINTS, "tiny"), STEPS, run_tensors(self.state), seen, facts, probes)
        return export_hf(run, dtype="fp32").path


def tree_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted keys as a tree."""
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *path, last = key.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def _write_words(directory: Path) -> None:
    """A tokenizer with a byte for each id: of a kind that classes for single architectures read as it is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
