"""The tiny trainings that the faults strike: recipes, rows, command lines, and where a run to go on with was killed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
    row: Callable[[int, random.Random], dict[str, Any]]
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


def _case(fields: dict[str, Any]) -> Case:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Case(**{**values, "row": _ROWS[values.get("row", "answers")]})


_ROWS = {"answers": _answers, "text": _text}
_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES, MESHES = ({name: _case(fields) for name, fields in _TABLE[kind].items()} for kind in ("alone", "meshes"))


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
    directory.mkdir(parents=True)
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
