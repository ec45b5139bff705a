"""Distillation against cross-entropy alone: four layers learn from SmolLM2, and from the same text without it.

    python -m tools.distill_campaign [--smollm2 DIR] [--steps 60] [--place DIR]

Both students are drawn from one seed with SmolLM2's config but four layers, see the same rows of Python's documentation
(Debian's package, fetched with apt-get) in the same order, and take as many steps: one by `method.kind: pretrain`, two
by `method.kind: distill`, of which one with the teacher in memory, and one with its 64 most probable tokens as columns.
Each is exported, loaded by transformers alone, and measured by plain cross-entropy on files that none has seen. Prints
a table; exits with 1 where a distilled student is not better than the plain one.
"""

import argparse
from pathlib import Path
from typing import Any

from tools.bench_rows import documentation
from tools.commands import ROOT, asked, read_lines, some, write_lines

TOKENS, ROWS = 256, 4
"""Tokens of a row, and rows of a step."""
HELD_OUT = 24
"""Rows that are measured."""
ARMS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"kind": "pretrain"},
    "teacher in memory": {"kind": "distill", "rows": "pretrain"},
    "64 tokens of it": {"kind": "distill", "rows": "pretrain", "top_k": 64},
}


def texts(docs: Path) -> list[str]:
    """The files of the documentation, in an order that has nothing to do with their names."""
    files = sorted(docs.rglob("*.txt"), key=lambda path: path.name[::-1])
    return [path.read_text(encoding="utf-8") for path in files]


def recipe(method: dict[str, Any], options: argparse.Namespace, place: Path, name: str) -> dict[str, Any]:
    """The recipe of one student."""
    teacher = {"teacher": str(options.smollm2)} if method["kind"] == "distill" else {}
    return {
        "output_dir": str(place / name.replace(" ", "-")),
        "model": {"name_or_path": str(options.smollm2), "init": "random", "config": {"num_hidden_layers": 4}},
        "method": {**method, **teacher},
        "data": {"train": str(place / "train.jsonl"), "max_length": TOKENS, "cache_dir": str(place / "cache")},
        "train": {"duration": f"{options.steps} steps", "global_batch_size": ROWS, "device": "cpu"},
        "optimizer": {"lr": 1e-3}, "schedule": {"kind": "cosine", "warmup": "10%"}, "checkpoint": {"every": "never"},
    }


def held_out_loss(run: Path, place: Path) -> float:
    """Nats per token of the run's student on the held-out rows, exported, and loaded by transformers."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.api.exports import export_hf

    directory = Path(export_hf(run).path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = [i for row in read_lines(place / "held.jsonl") for i in tokenizer(row["text"]).input_ids]
    rows = torch.tensor(ids[: HELD_OUT * TOKENS]).view(HELD_OUT, TOKENS)
    with torch.no_grad():
        losses = [cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:]).item() for row in rows]
    return sum(losses) / len(losses)


def main() -> int:
    """Train the students, and compare them."""
    options = asked(
        __doc__, smollm2=ROOT / ".demo" / "smollm2", steps=60, place=ROOT / ".demo" / "campaigns" / "distill",
        only=some(ARMS),
    )
    options.smollm2, place = options.smollm2.absolute(), options.place.absolute()
    place.mkdir(parents=True, exist_ok=True)
    from tuner import train

    every = texts(documentation(place / "docs"))
    for name, part in (("held", every[::20]), ("train", [text for i, text in enumerate(every) if i % 20])):
        write_lines(place / f"{name}.jsonl", ({"text": text} for text in part))
    losses = {}
    for name in options.only:
        run = train(recipe(ARMS[name], options, place, name), resume="auto", quiet=True).run_dir
        losses[name] = held_out_loss(Path(run), place)
        print(f"{name:18} {losses[name]:.4f} nats per held-out token after {options.steps} steps", flush=True)
    plain = losses.pop("cross-entropy", float("inf"))
    return 0 if all(loss < plain for loss in losses.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
