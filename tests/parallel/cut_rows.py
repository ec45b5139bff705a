"""Trainings whose rows are cut over processes beside the same training in one: losses, norms and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers

from tests.fixtures.rows import MadeRows
from tests.fixtures.tensors import whole
from tests.model.tiny import SHAPE, VOCAB, family_model
from tests.train.answers import Answers
from tests.train.synthetic import NoTokenizer, recipe_for
from tests.train.test_answer_losses import PACKED, PLAIN
from tuner.config.load import load_recipe
from tuner.data.batches import collate
from tuner.data.prepared import PreparedData, Row
from tuner.evals.scorer import judged
from tuner.model.decode import greedy
from tuner.model.divergence import top_tokens
from tuner.model.root import position_losses
from tuner.parallel.fsdp import sync_gradients
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, build
from tuner.setup.resolve import resolve
from tuner.train.evaluate import ByTerms, HeldOut, evaluate
from tuner.train.methods.method import Method, build_method
from tuner.train.step import forward_backward, optimizer_step

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHUNKS = {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5, "head_dim": 8}
MAX_LENGTH = 32
LENGTHS = ((19, 7, 1, 4), (32,), (3, 4, 2, 8, 9), (13, 12))
"""Documents of each row: of 31, 32, 26 and 25 tokens, some longer than the share of a process."""
APART = 1e-6


class PackedRows(MadeRows):
    """Rows of documents of which most tokens are trained; of the first one few, which lie at its end."""

    max_length = MAX_LENGTH

    def __init__(self) -> None:
        rng, first, made = np.random.default_rng(3), 0, list[Row]()
        for number, lengths in enumerate(LENGTHS):
            count = sum(lengths)
            trained = np.arange(count) > count - 6 if number == 0 else rng.random(count) < 0.8
            documents = np.arange(first, first := first + len(lengths))
            made.append(Row(rng.integers(3, VOCAB, count), trained, np.array(lengths, dtype=np.int32), documents))
        super().__init__(made)


@dataclass(frozen=True)
class Case:
    """A training, and how its processes are laid out."""

    family: str = "llama"
    sequence: int = 2
    tensor: int = 1
    processes: int = 2
    machines: int = 1
    shard: str = "full"
    micro: int = 2
    """Rows of a micro-batch; a step has four."""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    apart: float = APART
    """Relative, of losses, norms and gradients."""

    @property
    def name(self) -> str:
        """The case in a line."""
        axes = f"sequence{self.sequence}" + f" tensor{self.tensor}" * (self.tensor > 1)
        laid_out = f"{self.processes} processes {axes} {self.shard} {self.micro} rows"
        return f"{self.family} {laid_out} {self.sections or ''}"

    def assembly(self, directory: Path, rank: int | None) -> Assembly:
        """The training as a rank builds it, or one process alone. Its model is written by :func:`write`."""
        train = {"global_batch_size": len(LENGTHS), "micro_batch_size": self.micro}
        sections = {**self.sections, "train": {**train, **self.sections.get("train", {})}}
        info = RankInfo()
        if rank is not None:
            local = self.processes // self.machines
            info = RankInfo(rank=rank, local_rank=rank % local, world_size=self.processes, local_world_size=local)
            parallel = {
                "processes": self.processes, "shard": self.shard, "sequence": self.sequence, "tensor": self.tensor,
            }
            sections["parallel"] = {**parallel, **sections.get("parallel", {})}
        recipe = recipe_for(directory / self.family, **sections)
        rows: Any = PackedRows()
        prepared = PreparedData(Path("/none"), "key", {}, rows, None, [])
        tokenizer: Any = NoTokenizer()
        return build(resolve(recipe, MAX_LENGTH, info, range(0)), prepared, tokenizer, info)


THREE = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
OTHERS: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "gemma2": (transformers.Gemma2Config, SHAPE | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt-oss": (transformers.GptOssConfig, SHAPE | {"head_dim": 8, "sliding_window": 8} | EXPERTS),
    "llama4": (transformers.Llama4TextConfig, SHAPE | CHUNKS | {"num_local_experts": 2, "intermediate_size_mlp": 48}),
    "one key head": (transformers.LlamaConfig, SHAPE | {"num_key_value_heads": 1}),
    "three key heads": (transformers.LlamaConfig, SHAPE | THREE),
    "own key heads": (transformers.LlamaConfig, SHAPE | {"num_key_value_heads": 4}),
    "large vocabulary": (transformers.LlamaConfig, SHAPE | {"vocab_size": 1024}),
    "qwen2": (transformers.Qwen2Config, SHAPE),
}
"""Sinks, soft bounds, chunks and temperature, and numbers of key heads that processes divide or not."""


def write(directory: Path, family: str) -> None:
    """The tiny model of a family, whose attention sees more than noise; tied where its small models are."""
    torch.manual_seed(1)
    if family in OTHERS:
        kind, values = OTHERS[family]
        config = kind(**values, tie_word_embeddings=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    else:
        model = family_model(family, tied=family in {"gemma3", "qwen3"})
    model.save_pretrained(directory / family)


@dataclass(frozen=True)
class Taken:
    """What a training computes: its gradients by name, or other tensors."""

    gradients: dict[str, torch.Tensor]
    steps: list[tuple[float, float]]
    """Loss and gradient norm of two steps."""

    @staticmethod
    def of_answers(assembly: Assembly, methods: Sequence[str]) -> Taken:
        """Losses of answers to prompts and their gradients, method by method, in two micro-batches. Collective.

        Without any, those of the training's own method.
        """
        gradients, steps, state, mesh = {}, [], assembly.train_state, assembly.train_state.step_config.mesh
        batches = Answers(16).step(PACKED, 2, mesh.data_rank, mesh.data_size)
        for name in methods or [""]:
            chosen = replace(state, method=method_of(name)) if name else state
            sums, counts = forward_backward(chosen, 0, batches)
            loss = sums.loss(counts)
            if dist.is_initialized():
                dist.all_reduce(loss)
            gradients |= {f"{name} {key}": whole(gradient) for key, gradient in state.gradients().items()}
            steps.append((loss.item(), 1.0))
            state.optimizer.zero_grad()
        return Taken(gradients, steps)

    @staticmethod
    def of(assembly: Assembly) -> Taken:
        """Every gradient of the first step, whole; then two steps. Collective."""
        state = assembly.train_state
        forward_backward(state, 0, assembly.batches.step(0))
        gradients = {
            name: whole(gradient)
            for name, gradient in state.gradients().items()
            if not any(part.owns(name) for part in state.parts)  # as many rows as there is room for, in any order
        }
        state.optimizer.zero_grad()
        steps = [optimizer_step(state, i, assembly.batches.step(i), 1.0).read() for i in range(2)]
        return Taken(gradients, [(step.loss, step.grad_norm) for step in steps])

    def with_(self, other: Taken) -> Taken:
        """What two computed."""
        return Taken(self.gradients | other.gradients, self.steps + other.steps)

    def differences(self, found: Taken, apart: float = APART) -> list[str]:
        """Where another one is further away than it may be."""
        lines = [f"{name} is missing" for name in self.gradients.keys() ^ found.gradients.keys()]
        for name, wanted in self.gradients.items():
            off = float((found.gradients[name] - wanted).norm() / wanted.norm().clamp_min(1e-12))
            lines += [f"{name} is off by {off:.1e}"] if not off <= apart else []
        for step, (wanted_step, found_step) in enumerate(zip(self.steps, found.steps, strict=True)):
            for what, one, other in zip(("loss", "norm"), wanted_step, found_step, strict=True):
                off = abs(other - one) / abs(one)
                lines += [f"the {what} of step {step} is off by {off:.1e}"] if not off <= apart else []
        return lines


def method_of(name: str) -> Method:
    """One of the losses of answers."""
    tree: dict[str, Any] = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "method": PLAIN[name][0]}
    return build_method(load_recipe(tree).recipe.method)


OWN = """
import torch
from tuner.train.methods.method import Sum, Terms

def share():
    def loss(hidden, weight, bias, targets):
        logits = hidden @ weight.T
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        return losses + 0.1 * hidden.square().sum(), {"right": (logits.argmax(-1) == targets).sum().float()}
    return loss

class Whole:
    by_document = False
    def counts(self, batches):
        return {"tokens": batches.trained_count}
    def columns(self, batch):
        return {}
    def terms(self, hidden, head, targets, columns):  # one that takes all positions at once
        spread = (hidden - hidden.mean(0) if len(hidden) else hidden).square().sum()
        return Terms({"loss": Sum(head.cross_entropy(hidden, targets) + spread, "tokens")}, {})
"""
"""Losses of a user's own: a function of some positions, and a method that looks at all of them."""


def looked_at(assembly: Assembly) -> Taken:
    """What evaluations, scores of tasks, probes, samples and a teacher's columns are made of. Collective."""
    state, row = assembly.train_state, PackedRows().row(2)
    root, batch = state.root.eval(), collate([row, PackedRows().row(3)])
    held = HeldOut(cast("Any", PackedRows()), ("rows",), (sum(map(len, LENGTHS)),))
    found = evaluate(root, state.step_config, held, 2, None)
    by_terms = evaluate(root, state.step_config, held, 2, None, by_terms=ByTerms(state.method, 4))
    row_of = torch.as_tensor(batch.input_ids), torch.as_tensor(batch.position_ids), batch.lengths
    at = np.random.default_rng(0).permutation(batch.trained_positions)
    targets = torch.as_tensor(batch.targets[at])
    sync_gradients(root, True)
    with torch.no_grad():
        seen = {
            "losses": root(*row_of, at, targets, position_losses),
            "scores": root(*row_of, torch.as_tensor(at), targets, judged),
            "logits": root.logits(*row_of, torch.as_tensor(at[:5])),
            "answers": torch.tensor(greedy(root, [[5, 6, 7], [8]], {2}, [6, 9], torch.device("cpu"))[1]).float(),
            **root(*row_of, at, targets, partial(top_tokens, count=3, temperature=1.0, vocabulary=VOCAB)),
        }
    return Taken({name: tensor.double() for name, tensor in seen.items()}, [(found.loss, by_terms.loss)])
