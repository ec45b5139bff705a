"""Final losses of compact optimizer states against the spread of three seeds with float32 ones.

    python -m tools.optimizer_spread [--model DIR] [--steps 200] [--rows 2] [--length 128] [--only NAME ...]

Full fine-tuning of SmolLM2 on the pages of docs/, of which every eighth is held out: adamw with float32 states from
three seeds, and from the first of them with 8-bit states (`optimizer.state: 8bit`), with states and update on the host
(`optimizer.offload: host`), and with bf16 weights rounded stochastically. Each is a launch of `tuner train` that is
resumed where it stopped before. Prints one JSON line per variant as it ends: the held-out losses before and at the end,
and the mean training loss of the last tenth; and, once the three seeds are there, their least and largest held-out
loss, which variants are between those, and how far each is from the run of its own seed, in shares of the spread. Exits
with 1 where 8-bit states, or those on the host, end above the largest, or further from their own seed's run than the
seeds are from each other.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked, done, environment, read_lines, some, write_lines

STOCHASTIC = {"model.dtype": "bf16", "optimizer.rounding": "stochastic"}
VARIANTS: dict[str, dict[str, str]] = {
    "fp32-0": {}, "8bit": {"optimizer.state": "8bit"}, "fp32-1": {"seed": "1"}, "fp32-2": {"seed": "2"},
    "host": {"optimizer.offload": "host"}, "bf16-stochastic": STOCHASTIC,
    "8bit-bf16-stochastic": {**STOCHASTIC, "optimizer.state": "8bit"},
}
SEEDS = ("fp32-0", "fp32-1", "fp32-2")
WITHIN = ("8bit", "host")
"""Must end within the spread of the seeds."""
HELD_OUT = 8
RECIPE = """\
model: {{name_or_path: {model}}}
tokenizer: {{special_tokens_in_text: escape}}
method: {{kind: pretrain}}
data: {{train: train.jsonl, eval: held.jsonl, max_length: {length}, cache_dir: cache}}
train: {{duration: {steps} steps, global_batch_size: {rows}, micro_batch_size: {rows}, device: cpu}}
schedule: {{kind: cosine, warmup: 5%}}
eval: {{every: never, at_start: true, at_end: true, max_rows: 32}}
checkpoint: {{every: 100 steps, keep: 1, at_end: false}}
export: {{at_end: false}}
seed: 0
logging: {{level: warning}}
"""


def prepare(place: Path, options: argparse.Namespace) -> None:
    """Write the rows and the recipe."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    parts = {"train": [p for i, p in enumerate(pages) if i % HELD_OUT], "held": pages[::HELD_OUT]}
    for name, texts in parts.items():
        if not (file := place / f"{name}.jsonl").exists():
            write_lines(file, [{"text": text} for text in texts])
    (place / "r.yaml").write_text(
        RECIPE.format(model=options.model.absolute(), length=options.length, steps=options.steps, rows=options.rows)
    )


def train(place: Path, name: str) -> dict[str, Any]:
    """Train a variant; what its log says of the end."""
    flags = [word for key, value in VARIANTS[name].items() for word in (f"--{key}", value)]
    words = ["-m", "tuner", "train", "r.yaml", "--name", name, "--resume", "auto", *flags]
    done(words, place, environment(threads=None))
    steps, held = (read_lines(place / "runs" / name / "metrics.jsonl", kind) for kind in ("train", "eval"))
    last = steps[-max(1, len(steps) // 10) :]
    return {
        "variant": name, "steps": steps[-1]["step"], "held_out_before": round(held[0]["loss"], 5),
        "held_out": round(held[-1]["loss"], 5), "train": round(statistics.fmean(line["loss"] for line in last), 5),
    }


def main() -> int:
    """Train the variants, and hold them against the spread."""
    options = asked(
        __doc__, model=ROOT / ".demo" / "smollm2", steps=200, rows=(2, "of a step"), length=(128, "tokens of a row"),
        place=ROOT / ".demo" / "campaigns" / "optimizer-spread", only=some(VARIANTS),
    )
    place = options.place.absolute()
    place.mkdir(parents=True, exist_ok=True)
    prepare(place, options)
    ended: dict[str, float] = {}
    for name in options.only:
        found = train(place, name)
        ended[name] = found["held_out"]
        print(json.dumps(found), flush=True)
    if not all(seed in ended for seed in SEEDS):
        return 0
    losses = [ended[seed] for seed in SEEDS]
    least, largest = min(losses), max(losses)
    others = {name: loss for name, loss in ended.items() if name not in SEEDS}
    apart = {name: abs(loss - ended[SEEDS[0]]) / (largest - least) for name, loss in others.items()}
    found = {
        "seeds": [least, largest],
        "between": [name for name, loss in others.items() if least <= loss <= largest],
        "from_own_seed": {name: round(share, 3) for name, share in apart.items()},
    }
    print(json.dumps(found), flush=True)
    return 1 if any(ended[name] > largest or apart[name] > 1 for name in WITHIN if name in ended) else 0


if __name__ == "__main__":
    raise SystemExit(main())
