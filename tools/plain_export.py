"""Train a real model for two steps, export it, and load it where there is no tuner: the same text, the same logits.

    python -m tools.plain_export MODEL PLAIN/bin/python [--work DIRECTORY]

MODEL is a model's directory (`tools/build_smollm2.py` makes one); PLAIN a fresh virtual environment with torch,
transformers and peft alone. `tuner train` trains the model in full, with a LoRA adapter, and with one and a new token;
`tuner export-hf` exports all in float32, adapters as peft's directory. Two prompts are answered greedily: here by the
model rebuilt from the checkpoint, there from the exported directory (`tools/plain_answers.py`). Prints what was said
and how far the logits differ, as JSON; exits with 1 where a text differs, or a logit by more than 1e-5 of the largest.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked, done, environment, workplace, write_lines

PROMPTS = ["Order note: five garden hoses to Oslo, please.", "What is the capital of France?"]
NEW_TOKENS = 24
SAME = 1e-5
LORA = {"kind": "lora", "r": 8}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA},
    "tokens": {"adapter": LORA, "tokenizer": {"add_tokens": [", please."]}},
}


def command(work: Path, *words: str) -> str:
    """What a command of this checkout printed."""
    return done(["-m", "tuner", *words], work, environment(work / "cache", threads=None)).strip()


def trained(model: Path, work: Path, kind: str) -> Path:
    """Train two steps; returns the run directory."""
    turns = [("user", "Say {}, please."), ("assistant", "{} it is.")]
    rows = [{"messages": [{"role": role, "content": text.format(n)} for role, text in turns]} for n in range(32)]
    write_lines(work / "rows.jsonl", rows)
    recipe = {
        "name": kind, "model": {"name_or_path": str(model), "dtype": "fp32"},
        "data": {"train": "rows.jsonl", "max_length": 64},
        "train": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu", "precision": "fp32"},
        "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant", "warmup": "never"}, "logging": {"level": "error"},
        **KINDS[kind],
    }
    (work / f"{kind}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return Path(command(work, "train", f"{kind}.yaml"))


def answers_here(run: Path) -> list[dict[str, Any]]:
    """The answers of the model rebuilt from the run's checkpoint."""
    from transformers import AutoTokenizer

    from tools.plain_answers import answers
    from tuner.export.source import resolve
    from tuner.export.weights import load_trained

    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    return answers(load_trained(resolve(run)), tokenizer, PROMPTS, NEW_TOKENS)


def answers_there(python: str, directory: Path, base: Path | None) -> list[dict[str, Any]]:
    """The answers of an exported directory in the plain environment, isolated from this one's paths."""
    words = [python, "-I", str(ROOT / "tools" / "plain_answers.py"), str(directory), *PROMPTS]
    words += ["--tokens", str(NEW_TOKENS), *(["--base", str(base)] if base else [])]
    out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"]}).stdout
    found: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return found


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The largest difference of logits, relative to the largest logit; the base model has none of new tokens."""
    answers = zip(ours, theirs, strict=True)
    pairs = [pair for one, other in answers for pair in zip(one["logits"], other["logits"], strict=False)]
    return max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)


def check(model: Path, python: str, work: Path) -> dict[str, Any]:
    """Train, export and compare, in full and with an adapter; the figures and whether all is the same."""
    figures: dict[str, Any] = {"same": True}
    before = answers_there(python, model, None)
    for kind in KINDS:
        run = trained(model, work, kind)
        adapter = "merge" if kind == "full" else "keep"
        exported = Path(command(work, "export-hf", str(run), "--dtype", "fp32", "--adapter", adapter))
        ours, theirs = answers_here(run), answers_there(python, exported, None if kind == "full" else model)
        relative, moved = difference(ours, theirs), difference(ours, before)
        sizes = {len(answer["logits"]) for answer in (*ours, *theirs)}
        texts = [(a["text"], b["text"]) for a, b in zip(ours, theirs, strict=True)]
        figures[kind] = {"relative": relative, "relative_to_base": moved, "texts": [there for _, there in texts]}
        figures["same"] &= all(a == b for a, b in texts) and relative <= SAME < moved and len(sizes) == 1
    return figures


def main() -> None:
    """Check, in a directory that is removed unless one is given."""
    options = asked(__doc__, {"model": Path, "python": str}, work=Path)
    with workplace(options.work) as work:
        work.mkdir(parents=True, exist_ok=True)
        figures = check(options.model.absolute(), options.python, work)
    print(json.dumps(figures, indent=1))
    raise SystemExit(0 if figures["same"] else 1)


if __name__ == "__main__":
    main()
