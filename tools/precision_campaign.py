"""What computing in fp16 and fp8 changes of what is learned: losses and held-out losses against fp32 and bf16.

    python -m tools.precision_campaign [--steps 100] [--seeds 3] [--smollm2 DIR --smollm2-steps 3] [--out FILE]

A tiny model with weights from nothing, on this repository's documentation by its bytes, in each precision in turns,
with as many seeds; then some steps of a whole SmolLM2 where its directory is given. A line for each: the mean
difference of the training loss from fp32's, the largest, that of the held-out loss, overflows, and seconds a step.
Times are those of a CPU, which has units for neither fp16 nor fp8: they say what trying costs. And fp16 in as many
launches as it has steps must end with the very bits of one launch.

Exits with 1 where a gap is above what docs/train.md says, a run diverges, or resuming changes a bit.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.models.llama import LlamaConfig

from tools.commands import ROOT, asked, read_lines, workplace, write_lines
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import newest
from tuner.config.load import load_recipe
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
ALLOWED = {"bf16": 0.02, "fp16": 0.005, "fp8": 0.03}
"""Nats: the held-out loss of the tiny model may be so much above that of fp32, as a mean over the seeds."""


@dataclass(frozen=True)
class Run:
    """The lines that a run wrote of its steps, and its last held-out loss."""

    steps: list[dict[str, Any]]
    held_out: float | None

    @staticmethod
    def of(directory: Path) -> Run:
        """What is in a run's directory."""
        steps, held_out = (read_lines(directory / "metrics.jsonl", kind) for kind in ("train", "eval"))
        return Run(steps, held_out[-1]["loss"] if held_out else None)

    @property
    def losses(self) -> list[float]:
        """Of each step."""
        return [line["loss"] for line in self.steps]


@dataclass(frozen=True)
class Gap:
    """A run against the same one in fp32; losses in nats."""

    mean: float
    largest: float
    held_out: float | None
    overflows: int
    step_s: float

    @staticmethod
    def between(run: Run, plain: Run) -> Gap:
        """Over the same steps."""
        gaps = [one - other for one, other in zip(run.losses, plain.losses, strict=True)]
        held_out = None if run.held_out is None or plain.held_out is None else run.held_out - plain.held_out
        overflows = sum(line.get("overflow", False) for line in run.steps)
        step_s = statistics.median(line["step_s"] for line in run.steps)
        return Gap(statistics.mean(gaps), max(map(abs, gaps)), held_out, overflows, step_s)

    def line(self, name: str) -> str:
        """For people."""
        held_out = "-" if self.held_out is None else f"{self.held_out:+.5f}"
        return (
            f"{name:<14} loss {self.mean:+.5f} mean, {self.largest:.5f} largest; held out {held_out}; "
            f"{self.overflows} overflows; {self.step_s:.3f} s a step"
        )


def launch(place: Path, name: str, keys: Mapping[str, dict[str, Any]], **train_keys: Any) -> Path:
    """Train in this process; the directory of the run."""
    tree: dict[str, Any] = {
        "output_dir": str(place / name), "method": {"kind": "pretrain"},
        "data": {"train": str(place / "rows.jsonl"), "cache_dir": str(place / "cache"), "max_length": 64},
        "optimizer": {"lr": 1e-3}, "checkpoint": {"every": "never"}, "logging": {"level": "warning"},
        **{section: dict(values) for section, values in keys.items() if section != "data"},
        "train": {"device": "cpu", "global_batch_size": 4, **train_keys},
    }
    tree["data"] |= keys.get("data", {})
    seed = tree.pop("seed_of", {"seed": 0})["seed"]
    console = Console(main=False)
    return train(load_recipe({**tree, "seed": seed}), LaunchOptions(resume="auto"), RankInfo(), console).run_dir


def tiny_keys(place: Path, seed: int) -> dict[str, dict[str, Any]]:
    """The sections of a tiny run."""
    return {
        "model": {"name_or_path": str(place / "model"), "init": "random"}, "tokenizer": {"name_or_path": "byte"},
        "data": {"eval": "5%"}, "eval": {"every": "never", "samples": 0}, "seed_of": {"seed": seed},
    }


def tiny(place: Path, steps: int, seeds: int) -> tuple[dict[str, list[Gap]], float]:
    """Gaps of the tiny model by precision, one a seed; and how far apart the held-out losses of fp32's seeds are."""
    found: dict[str, list[Gap]] = {precision: [] for precision in PRECISIONS[1:]}
    plain = []
    for seed in range(seeds):
        runs = {}
        for precision in PRECISIONS:
            keys = tiny_keys(place, seed)
            there = launch(place, f"{precision}-{seed}", keys, precision=precision, duration=f"{steps} steps")
            runs[precision] = Run.of(there)
        plain.append(runs["fp32"])
        for precision, gaps in found.items():
            gaps.append(Gap.between(runs[precision], runs["fp32"]))
            print(gaps[-1].line(f"{precision}, seed {seed}"), flush=True)
    ends = [run.held_out for run in plain if run.held_out is not None]
    print(f"fp32: held-out losses {', '.join(f'{end:.4f}' for end in ends)}", flush=True)
    return found, max(ends) - min(ends)


def smollm2(place: Path, model: Path, steps: int) -> dict[str, Gap]:
    """Gaps of a whole SmolLM2 by precision."""
    keys: dict[str, dict[str, Any]] = {"model": {"name_or_path": str(model)}, "optimizer": {"lr": 1e-4}}
    runs = {}
    for precision in PRECISIONS:
        there = launch(
            place, f"smollm2-{precision}", keys, precision=precision, duration=f"{steps} steps", global_batch_size=1
        )
        runs[precision] = Run.of(there)
        if precision != "fp32":
            print(Gap.between(runs[precision], runs["fp32"]).line(f"SmolLM2, {precision}"), flush=True)
    return {precision: Gap.between(run, runs["fp32"]) for precision, run in runs.items() if precision != "fp32"}


def resumed_bits(place: Path, steps: int) -> bool:
    """Whether fp16 in as many launches as steps ends with the bits of one launch."""
    hashes = []
    for name, launches in (("whole", 1), ("parts", steps)):
        for _ in range(launches):
            limit = "never" if launches == 1 else "1 step"
            keys = tiny_keys(place, 0)
            there = launch(place, name, keys, precision="fp16", duration=f"{steps} steps", stop_after=limit)
        saved = newest(there / "checkpoints")
        hashes.append(None if saved is None else content_sha256(saved))
    print(f"fp16, {steps} steps in one launch and in {steps}: {hashes[0]}, {hashes[1]}", flush=True)
    return hashes[0] == hashes[1]


def prepare(place: Path) -> None:
    """The shape of the tiny model, and rows of text, in which no control token is written out."""
    LlamaConfig(**SHAPE).save_pretrained(place / "model")
    texts = [path.read_text(encoding="utf-8").replace("<|", "<") for path in sorted((ROOT / "docs").rglob("*.md"))]
    write_lines(place / "rows.jsonl", [{"text": text} for text in texts])


def main() -> int:
    """Run all of it; 1 where a bound is broken."""
    options = asked(__doc__, steps=100, seeds=3, smollm2=Path, smollm2_steps=3, out=Path)
    with workplace() as place:
        prepare(place)
        same = resumed_bits(place, 6)
        gaps, spread = tiny(place, options.steps, options.seeds)
        whole = {} if options.smollm2 is None else smollm2(place, options.smollm2.absolute(), options.smollm2_steps)
    means = {name: statistics.mean(gap.held_out or 0.0 for gap in each) for name, each in gaps.items()}
    for name, mean in means.items():
        print(f"{name}: held out {mean:+.5f} nats of {ALLOWED[name]} allowed; fp32's seeds differ by {spread:.5f}")
    if options.out is not None:
        plain = {name: [asdict(gap) for gap in each] for name, each in gaps.items()}
        figures = {"tiny": plain, "smollm2": {name: asdict(gap) for name, gap in whole.items()}, "spread": spread}
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if same and all(mean <= ALLOWED[name] for name, mean in means.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
