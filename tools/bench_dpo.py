"""Steps per second and peak memory of DPO against TRL's DPOTrainer on SmolLM2, alternating in one run.

    python -m tools.bench_dpo --model DIR [--rounds 2] [--steps 5] [--trl-python PYTHON] [--trl-path DIR]

400 real pairs (tools/real_preferences.py) whose answers have at most 1,024 tokens with their prompt. A run
takes eight times `--steps` of them, evenly from all 400 in the order of their lengths, so that each run has pairs of
every length. Both sides get the same token ids with the same boundary of prompt and answer, train all weights with the
same optimizer and rate, and see each pair once; TRL takes eight pairs a step, ours the packed rows that hold about as
many. Time is given for eight pairs.

TRL runs with its defaults (bf16, recomputing, a second model as reference) and in its best configuration: without
recomputing, two pairs at a time, with precomputed references (which are not in its step then), and with pairs of
like length in one batch.
Packing without padding is not to be had in TRL 1.16. Ours is the real command with its defaults; its references are
columns, computed before the first step. `whole_s` has all of it: the process from its start to its end, by eight pairs.

`step_s` is the time of the steps after the first one by the pairs in them. Peaks are those of the process. A table goes
to stderr, one JSON object to stdout; exit 1 where a goal is missed.
"""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import real_preferences as real
from tools.commands import ROOT, asked, read_lines, say, workplace, write_lines
from tools.measures import alternated, machine
from tools.preference_vs_trl import run_json, run_trl, token_rows

ALL, LONGEST, PER_STEP, ROW, LR = 400, 1024, 8, 2048, 1e-6
GOALS = {"trl, defaults": 4.0, "trl, best": 2.5}
PEAK_GOAL = 0.6
BEST = {
    "bf16": True,
    "gradient_checkpointing": False,
    "precompute_ref_log_probs": True,
    "per_device_train_batch_size": 2,  # eight pairs at once need more than 24 GB without recomputing
    "gradient_accumulation_steps": 4,
}


@dataclass
class Bench:
    """The files of one run, and how each side is started."""

    model: Path
    work: Path
    steps: int
    prefix: list[str]
    trl_python: str
    trl_path: str | None
    of: int = 0
    """Pairs to choose from."""
    pairs_of_rows: tuple[int, ...] = ()
    rows_per_step: int = 1

    def prepare(self, sources: Path) -> None:
        """Choose the pairs, write them for the command, and what it makes of them as token ids for TRL."""
        kept = [pair for pair in self._with_lengths(real.pairs(sources)) if pair[0] <= LONGEST][:ALL]
        by_length = sorted(range(len(kept)), key=lambda index: kept[index][0])
        count = self.steps * PER_STEP
        chosen = sorted(by_length[(2 * i + 1) * len(kept) // (2 * count)] for i in range(count))
        self.of = len(kept)
        write_lines(self.work / "pairs.jsonl", [kept[index][1] for index in chosen])
        rows = token_rows(self._prepare(packing=False), "dpo")
        if len(rows) != count:
            raise SystemExit(f"{len(rows)} of {count} pairs were prepared")
        (self.work / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        (self.work / "sorted.json").write_text(json.dumps(sorted(rows, key=_longest)), encoding="utf-8")
        self.pairs_of_rows = tuple(self._pairs_of_rows())
        self.rows_per_step = max(1, round(PER_STEP * len(self.pairs_of_rows) / count))

    def ours(self) -> dict[str, Any]:
        """Run the command from a cold cache of references: its own metrics, and the time of its process."""
        recipe = self.work / "recipe.yaml"
        run = self.work / f"run-{time.time_ns()}"
        settings = self.recipe(packing=True) | {"output_dir": str(run)}
        settings["train"] |= {"global_batch_size": self.rows_per_step}
        settings["data"] |= {"cache_dir": str(self.work / f"cache-{time.time_ns()}")}
        recipe.write_text(json.dumps(settings), encoding="utf-8")
        start = time.perf_counter()
        self._tuner("train", str(recipe))
        whole = time.perf_counter() - start
        steps = read_lines(run / "metrics.jsonl", "train")
        size = self.rows_per_step
        pairs = [sum(self.pairs_of_rows[i : i + size]) for i in range(0, len(self.pairs_of_rows), size)]
        return {
            "step_s": PER_STEP * sum(line["step_s"] for line in steps[1:]) / sum(pairs[1 : len(steps)]),
            "whole_s": PER_STEP * whole / sum(pairs), "peak_gib": max(line["mem_gib"] for line in steps),
            "loss": statistics.fmean(line["loss"] for line in steps),
        }

    def theirs(self, rows: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Run TRL with these settings beside the ones that make both sides do the same work."""
        same = {"learning_rate": LR, "lr_scheduler_type": "constant", "adam_beta2": 0.95, "max_length": LONGEST}
        run = {
            "name": "run", "trainer": "dpo", "rows": str(self.work / rows), "steps": self.steps,
            "settings": {"per_device_train_batch_size": PER_STEP, **same, **settings},
        }
        start = time.perf_counter()
        found = run_trl([*self.prefix, self.trl_python], self.trl_path, self.model, self.work, [run])
        whole = time.perf_counter() - start
        ran = found["runs"]["run"]
        return {
            "step_s": statistics.fmean(ran["step_s"][1:]), "whole_s": whole / self.steps, "peak_gib": ran["peak_gib"],
            "loss": statistics.fmean(ran["loss"]), "versions": found["versions"],
        }

    def recipe(self, packing: bool) -> dict[str, Any]:
        """What the command is given; all else is its default."""
        return {
            "output_dir": str(self.work / "run"),
            "model": {"name_or_path": str(self.model)},
            "method": {"kind": "dpo"},
            "data": {
                "train": str(self.work / "pairs.jsonl"), "max_length": ROW, "packing": packing, "shuffle": False,
                "cache_dir": str(self.work / "cache"),
            },
            "train": {"duration": "1 epoch", "device": "cpu"},
            "optimizer": {"lr": LR},
            "schedule": {"kind": "constant", "warmup": "never"},
            "checkpoint": {"at_end": False},
        }

    def _with_lengths(self, pairs: list[real.Row]) -> list[tuple[int, real.Row]]:
        """Each pair with the tokens of its longer conversation."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)

        def tokens(messages: list[dict[str, str]]) -> int:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        return [(max(tokens(pair["prompt"] + pair[side]) for side in ("chosen", "rejected")), pair) for pair in pairs]

    def _pairs_of_rows(self) -> list[int]:
        from tuner.data.prepared import open_prepared

        return [len(row.lengths) // 2 for row in open_prepared(self._prepare(packing=True)).train]

    def _prepare(self, packing: bool) -> Path:
        recipe = self.work / "prepare.yaml"
        recipe.write_text(json.dumps(self.recipe(packing)), encoding="utf-8")
        return Path(self._tuner("prepare-data", str(recipe))["artifacts"]["path"])

    def _tuner(self, *words: str) -> Any:
        return run_json([*self.prefix, sys.executable, "-m", "tuner", *words, "--json"], {"PYTHONPATH": str(ROOT)})


def _longest(row: dict[str, Any]) -> int:
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Alternate the three sides and compare."""
    sides = {
        "tuner": bench.ours,
        "trl, defaults": lambda: bench.theirs("rows.json", {}),
        "trl, best": lambda: bench.theirs("sorted.json", BEST),
    }

    def told(number: int, side: str, last: dict[str, Any]) -> None:
        say(
            f"round {number}  {side:14} {last['step_s']:7.2f} s a step, {last['whole_s']:7.2f} s with all else, "
            f"{last['peak_gib']:.2f} GiB"
        )

    took = alternated(sides, rounds, told)
    figures = {side: _figures(found) for side, found in took.items()}
    report = {
        "machine": machine("cpu"), "versions": took["trl, best"][0]["versions"],
        "pairs": {"of": bench.of, "a_run": bench.steps * PER_STEP, "a_row": _mean(bench.pairs_of_rows)},
        "sides": figures,
    }
    return report | verdict(figures)


def verdict(figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Ratios of steps, of all, and of peaks, and what was missed."""
    ours, against, missed = figures["tuner"], {}, []
    for side, goal in GOALS.items():
        other = figures[side]
        against[side] = {
            "ratio_step": round(other["step_s"] / ours["step_s"], 2),
            "ratio_whole": round(other["whole_s"] / ours["whole_s"], 2),
            "of_its_peak": round(ours["peak_gib"] / other["peak_gib"], 2),
        }
        if against[side]["ratio_step"] < goal:
            missed.append(f"{side}: {against[side]['ratio_step']} < {goal}")
        if against[side]["of_its_peak"] > PEAK_GOAL:
            missed.append(f"{side}: peak {against[side]['of_its_peak']} > {PEAK_GOAL}")
    return {"against": against, "missed": missed}


def _figures(found: list[dict[str, Any]]) -> dict[str, float]:
    steps = sorted(one["step_s"] for one in found)
    return {
        "step_s": round(statistics.median(steps), 3), "least": round(steps[0], 3), "most": round(steps[-1], 3),
        "whole_s": round(statistics.median(one["whole_s"] for one in found), 3),
        "peak_gib": round(max(one["peak_gib"] for one in found), 2), "loss": round(found[0]["loss"], 4),
    }


def _mean(values: Sequence[int]) -> float:
    return round(statistics.fmean(values), 2)


def _table(report: dict[str, Any]) -> None:
    say(f"\n{'':14} {'s a step':>9} {'spread':>17} {'with all':>9} {'GiB':>6} {'loss':>7}")
    for side, one in report["sides"].items():
        spread = f"{one['least']:.2f} - {one['most']:.2f}"
        times = f"{one['step_s']:9.2f} {spread:>17} {one['whole_s']:9.2f}"
        say(f"{side:14} {times} {one['peak_gib']:6.2f} {one['loss']:7.4f}")
    for side, one in report["against"].items():
        say(
            f"against {side:14} steps {one['ratio_step']:.2f}x, with all else {one['ratio_whole']:.2f}x, "
            f"{one['of_its_peak']:.2f} of its peak"
        )
    say("; ".join(report["missed"]) or "every goal reached")


def main() -> int:
    """Measure and print the report."""
    given = asked(
        __doc__, model=(ROOT / ".demo" / "smollm2", "SmolLM2's directory"),
        sources=(ROOT / ".demo" / "other-tools", "where packages are"), rounds=2,
        steps=(5, "of eight pairs each; the first is warm-up"),
        prefix=("", "runs each measured command, such as taskset -c 0,1"), trl_python=sys.executable, trl_path=str,
    )
    with workplace() as directory:
        bench = Bench(
            given.model.absolute(),
            directory,
            given.steps,
            shlex.split(given.prefix),
            given.trl_python,
            given.trl_path,
        )
        bench.prepare(given.sources)
        report = measure(bench, given.rounds)
    _table(report)
    print(json.dumps(report))
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
