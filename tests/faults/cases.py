"""The tiny trainings that the faults strike: recipes, rows, command lines, and where a run to go on with was killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = Path("runs/a")
COMMON = """\
model: {name_or_path: %s, kernels: torch}
tokenizer: {name_or_path: byte}
data: {train: %s, eval: 10%%, max_length: 64, workers: 1}
train: {duration: 4 steps, global_batch_size: %d, micro_batch_size: 2, device: cpu}
optimizer: {lr: 1e-2}
checkpoint: {every: 1 steps}
logging: {console_every: 1 h}
"""


def _answers(number: int, rng: random.Random) -> dict[str, Any]:
    return {"prompt": f"{number} ", "completion": "ab" * rng.randint(1, 5)}


def _text(number: int, rng: random.Random) -> dict[str, Any]:
    return {"text": f"{number}: " + "ab" * rng.randint(1, 60)}


@dataclass(frozen=True)
class Case:
    """A recipe beside the common one, and what differs in its jobs."""

    recipe: str
    broken: tuple[str, str]
    """Where the run that `resume` goes on with was killed: in a call's path, and the kind of the call."""
    row: Callable[[int, random.Random], dict[str, Any]] = _answers
    export: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    """What `resume` begins anew, as long as the run's record does not say that it did."""
    mesh: tuple[str, ...] = ()
    """The layout that `resume` goes on with, where it is another."""
    processes: int = 1
    """How many train, unless the campaign says so."""
    rows: int = 4
    """Of a step."""
    mixture: bool = False
    """Whether its model has experts."""


CASES: dict[str, Case] = {
    "lora": Case(
        """\
adapter: {kind: lora, r: 2, dropout: 0.2}
data: {packing: false}
train: {precision: fp32}
checkpoint: {keep: 2, keep_best: eval/loss}
eval: {every: 2 steps, at_start: false, samples: 1, samples_at: all}
logging: {level: info}
""",
        broken=("/.trash-", "unlink"),
    ),
    "full": Case(
        """\
data: {packing: false}
train: {precision: fp32}
checkpoint: {keep: 1, marks: [2 steps]}
eval: {every: never, at_start: false, at_end: false, samples: 0}
optimizer: {kind: muon}
logging: {level: warning}
""",
        broken=("/.tmp-step-3", "flush"),
    ),
    "packed": Case(
        """\
model: {freeze: ["*.mlp.*"]}
method: {kind: pretrain}
data: {packing: true}
train: {precision: bf16}
checkpoint: {keep: 2}
eval: {every: 3 steps, at_start: true, at_end: false, samples: 0}
optimizer: {kind: adafactor}
logging: {level: warning}
""",
        broken=("/.tmp-step-4", "rename"),
        row=_text,
        export=("--dtype", "fp32"),
    ),
    "dora": Case(
        """\
tokenizer: {add_tokens: ["<one>", {token: "<two>", special: true}]}
adapter: {kind: dora, r: 2, dropout: 0.1, modules_to_save: ["*layernorm"]}
data: {packing: false}
train: {precision: fp32}
checkpoint: {keep: 1}
eval: {every: never, at_start: false, at_end: true, samples: 0}
logging: {level: warning}
""",
        broken=("/.tmp-step-3", "flush"),
        export=("--adapter", "keep"),
        reset=("--reset", "optimizer,schedule,rng", "--train.duration", "5 steps", "--optimizer.lr", "5e-3"),
    ),
}
"""By name: an adapter with dropout, evaluations and a best one, merged; all weights under Muon with a marked step;
packed text, frozen weights, Adafactor; new tokens, an adapter kept as it is, and a run that begins anew in part."""

MESHES: dict[str, Case] = {
    "tensor": Case(
        """\
adapter: {kind: lora, r: 2, dropout: 0.2}
data: {packing: false}
train: {precision: fp32}
parallel: {tensor: 2}
checkpoint: {keep: 1, keep_best: eval/loss}
eval: {every: 2 steps, at_start: false, samples: 1, samples_at: all}
logging: {level: warning}
""",
        broken=("/.trash-", "unlink"),
        processes=2,
    ),
    "sequence": Case(
        """\
method: {kind: pretrain}
data: {packing: true}
train: {precision: bf16}
parallel: {sequence: 2}
checkpoint: {keep: 2}
eval: {every: 3 steps, at_start: true, at_end: false, samples: 0}
optimizer: {kind: adafactor}
logging: {level: warning}
""",
        broken=("/.tmp-step-4", "rename"),
        row=_text,
        processes=2,
    ),
    "shards": Case(
        """\
data: {packing: false}
train: {precision: fp32}
parallel: {tensor: 2, shard: full}
checkpoint: {keep: 1, marks: [2 steps]}
eval: {every: never, at_start: false, at_end: false, samples: 0}
optimizer: {kind: muon}
logging: {level: warning}
""",
        broken=("/.tmp-step-3", "flush"),
        mesh=("--parallel.tensor", "1", "--parallel.sequence", "2"),
        processes=4,
    ),
    "experts": Case(
        """\
method: {kind: pretrain}
data: {packing: true}
model: {router_aux_loss_coef: 0.001}
train: {precision: fp32}
parallel: {expert: 2}
checkpoint: {keep: 2}
eval: {every: never, at_start: false, at_end: true, samples: 0}
logging: {level: warning}
""",
        broken=("/.tmp-step-3", "rename"),
        row=_text,
        mesh=("--parallel.expert", "1"),
        processes=4,
        rows=8,
        mixture=True,
    ),
}
"""By name: split layers under an adapter; cut rows; both axes' shards, which go on with cut rows; experts that are
spread, and go on with shards alone."""


@dataclass(frozen=True)
class Job:
    """A command line, what the directory holds before, and the command line that finishes it after a fault."""

    name: str
    start: str
    command: tuple[str, ...]
    again: tuple[str, ...]


def jobs_of(case: Case, recipe: Path) -> list[Job]:
    """The command lines of a case, in the order in which they can be run."""
    prepare = ("prepare-data", str(recipe))
    train = ("train", str(recipe), "--name", "a", "--resume", "auto")
    resume = ("resume", str(RUN))
    export = ("export-hf", str(RUN), "--shard-size", "20KB", *case.export)
    return [
        Job("prepare", "empty", prepare, prepare),
        Job("train", "prepared", train, train),
        Job("resume", "broken", (*resume, *case.reset, *case.mesh), (*resume, *case.mesh)),
        Job("export", "trained", export, export),
    ]


def write_inputs(directory: Path, case: Case, settings: str) -> None:
    """Write a model, rows and the recipe; `settings` are more of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    directory.mkdir()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)) if case.mixture else None
    (model or LlamaForCausalLM(LlamaConfig(**shape))).save_pretrained(directory / "model")
    rng = random.Random(0)
    rows = [case.row(number, rng) for number in range(12)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = COMMON % (directory / "model", directory / "rows.jsonl", case.rows)
    (directory / "r.yaml").write_text(_merged(common + settings + case.recipe))


def _merged(text: str) -> str:
    """A recipe out of lines, each a section; what several lines say of a section stands in one."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(": ")
        sections.setdefault(name, []).append(rest[1:-1])
    return "".join(f"{name}: {{{', '.join(parts)}}}\n" for name, parts in sections.items())
