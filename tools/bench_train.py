"""Measures a step of `tuner train` against TRL's SFTTrainer on the same packed rows, alternating in one run.

    python -m tools.bench_train smollm2-full --model DIR [--rounds 3] [--steps 16] [--prefix "taskset -c 0,1"]
    python -m tools.bench_train qwen3-9m
    python -m tools.bench_train gpt-oss-15m
    python -m tools.bench_train qwen3.5-10m
    python -m tools.bench_train qwen3-0.6b-4k --device cuda
    python -m tools.bench_train parity --model DIR

Ours is the real command with its defaults: metrics, evaluation of one held-out row at every 10 % of the run, final
checkpoint. The peer runs with its own defaults and in its best configuration: on a CPU `bf16=True` without
recomputation; on CUDA bf16, liger's kernels and no recomputation. Both get the rows that `prepare-data` packed, in
that order, every position trained, the same number of tokens a step, the same optimizer and rate, and the same
threads; where plain transformers does not keep the documents of a row apart, the peer gets those of a step as a padded
batch. The losses of both are compared before a ratio is printed.

`step_s` is the median over the steps after the warm-up: ours as the command writes it to metrics.jsonl (waiting for
data included, evaluation left out), the peer's from one step's end to the next. `whole_s` is the time from the
beginning of the loop to the end of the command, by its steps: evaluation, the final checkpoint, the first slow steps
and leaving included; the peer's ends with `train()` and has no evaluation and no checkpoint. `of_peak` is the
arithmetic of a step (bench_train_cases.py) by the rate of one large bf16 product measured in the same round.

`parity` trains in fp32 for 20 steps on rows of 256 tokens, and in bf16 for 200 steps on rows of 128: the losses of
the first may differ by 1e-3; over the second, means of 50 steps differ by less than three TRL runs, of the same rows
in three orders, do. A table goes to stderr, one JSON object to stdout; exit 1 where a goal is missed. Needs `trl`.
"""

import json
import shlex
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench_train_cases import CASES, Case, flops_per_step, packed_rows, write_model, write_rows
from tools.commands import ROOT, asked, done, environment, one_of, read_lines, say, workplace
from tools.measures import alternated, machine

WARM_UP = 3
SPEED_LR, PARITY_LR = 1e-5, 1e-4
LOSS_ALLOWED = {"full": 2e-2, "lora": 5e-2}
"""Largest difference of losses while both sides compute in bf16, at a rate low enough that rounding does not grow: a
sign of unequal work. The base under our adapter is kept in bf16, TRL's in float32, which alone is 1e-2 before the first
update. That the curves are the same is for `parity` to show, in fp32 and at a rate ten times higher."""
EXACT, ROUNDED, WINDOW = {"steps": 20, "max_length": 256}, {"steps": 200, "max_length": 128}, 50
PEAK = """
import torch, time
device = torch.device("{device}")
a, b = (torch.randn({n}, {n}, device=device).bfloat16() for _ in range(2))
best = 1e9
for _ in range(6):
    start = time.perf_counter()
    a @ b
    if device.type == "cuda":
        torch.cuda.synchronize()
    best = min(best, time.perf_counter() - start)
print(2 * {n} ** 3 / best)
"""


@dataclass
class Bench:
    """One case on one machine: its files, and how each side is run."""

    case: Case
    model: Path
    work: Path
    device: str
    prefix: list[str]
    precision: str = "auto"
    lr: float = SPEED_LR

    def prepare(self) -> list[dict[str, list[int]]]:
        """Write rows, prepare them with the command, and hand the packed rows to the other side."""
        vocab = json.loads((self.model / "config.json").read_text())["vocab_size"]
        count = self.case.steps * self.case.rows
        write_rows(self.work / "train.jsonl", vocab, self.case.max_length, count, seed=1)
        write_rows(self.work / "eval.jsonl", vocab, self.case.max_length, 1, seed=2)
        (self.work / "recipe.yaml").write_text(json.dumps(self.recipe()), encoding="utf-8")
        said = self._run("-m", "tuner", "prepare-data", str(self.work / "recipe.yaml"), "--json")
        rows = packed_rows(Path(said["artifacts"]["path"]))
        (self.work / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return rows

    def recipe(self) -> dict[str, Any]:
        """What the command is given; all else is its default."""
        return {
            "output_dir": str(self.work / "run"),
            "model": {"name_or_path": str(self.model)},
            "adapter": {"kind": "lora"} if self.case.lora else {"kind": "none"},
            "method": {"kind": "sft", "train_on": "all"},
            "data": {
                "train": {"path": str(self.work / "train.jsonl"), "format": "tokens"},
                "eval": {"path": str(self.work / "eval.jsonl"), "format": "tokens"}, "max_length": self.case.max_length,
                "shuffle": False,
            },
            "train": {
                "duration": f"{self.case.steps} steps", "global_batch_size": self.case.rows,
                "micro_batch_size": self.case.rows, "device": self.device, "precision": self.precision,
            },
            "optimizer": {"lr": self.lr},
            "schedule": {"kind": "constant", "warmup": "1 step"},
        }

    def ours(self) -> dict[str, Any]:
        """Run the command; its own metrics and the time of its whole loop."""
        run = self.work / "run"
        shutil.rmtree(run, ignore_errors=True)
        self._run("-m", "tuner", "train", str(self.work / "recipe.yaml"), "--json", prefix=self.prefix)
        ended = time.time()
        steps = read_lines(run / "metrics.jsonl", "train")
        began = (run / "recipe.resolved.yaml").stat().st_mtime  # written when all is built, before the first step
        return {
            "step_s": [line["step_s"] for line in steps], "loop_s": ended - began,
            "loss": [line["loss"] for line in steps], "peak_gib": max(line["mem_gib"] for line in steps),
        }

    def peer(self, settings: dict[str, Any], shuffled: int | None = None) -> dict[str, Any]:
        """Run TRL with these settings beside the ones that make both sides do the same work."""
        same = {
            "per_device_train_batch_size": self.case.rows, "learning_rate": self.lr, "lr_scheduler_type": "constant",
            "adam_beta2": 0.95, "max_length": self.case.max_length, "use_cpu": self.device == "cpu",
        }
        rows = json.loads((self.work / "rows.json").read_text())
        if shuffled is not None:
            import random

            random.Random(shuffled).shuffle(rows)
        (self.work / "peer_rows.json").write_text(json.dumps(rows), encoding="utf-8")
        job = {
            "model": str(self.model), "rows": str(self.work / "peer_rows.json"), "output_dir": str(self.work / "peer"),
            "steps": self.case.steps, "lora": self.case.lora, "padded": self.case.padded,
            "settings": {**same, **settings},
        }
        (self.work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        tool = str(ROOT / "tools" / "bench_train_trl.py")
        return self._run(tool, str(self.work / "job.json"), prefix=self.prefix)

    def best(self) -> dict[str, Any]:
        """The peer's best configuration on this device."""
        liger = {"use_liger_kernel": True} if self.device == "cuda" else {}
        return {"bf16": True, "gradient_checkpointing": False, **liger}

    def peak(self) -> float:
        """Operations a second of one large bf16 product."""
        program = PEAK.format(device=self.device, n=8192 if self.device == "cuda" else 4096)
        return float(self._run("-c", program, prefix=self.prefix))

    def _run(self, *words: str, prefix: Sequence[str] = ()) -> Any:
        env = environment(self.work / "cache", threads=None, TOKENIZERS_PARALLELISM="false")
        return json.loads(done(words, self.work, env, prefix).strip().splitlines()[-1])


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Alternate the three sides and the peak, and compare."""
    rows = bench.prepare()
    sides = {
        "tuner": bench.ours,
        "trl, defaults": lambda: bench.peer({}),
        "trl, best": lambda: bench.peer(bench.best()),
    }

    def told(number: int, side: str, last: Any) -> None:
        if side != "peak":
            say(f"round {number}  {side:16} {median_step(last):8.3f} s a step, {last['loop_s']:7.1f} s in all")

    took: dict[str, list[Any]] = alternated({"peak": bench.peak, **sides}, rounds, told)
    peaks = took.pop("peak")
    flops = flops_per_step(bench.model, bench.case.lora, rows) / bench.case.steps
    report: dict[str, Any] = {
        "case": bench.case.name, "machine": machine(bench.device), "steps": bench.case.steps,
        "tokens_per_step": sum(len(row["input_ids"]) for row in rows) / bench.case.steps,
        "documents_per_row": round(sum(len(row["seq_lengths"]) for row in rows) / len(rows), 1),
        "flops_per_step": flops, "peak_flops": statistics.median(peaks), "versions": took["trl, best"][0]["versions"],
        "loss": {side: [round(loss, 4) for loss in found[0]["loss"]] for side, found in took.items()},
        "sides": {side: figures(found, flops, statistics.median(peaks)) for side, found in took.items()},
    }
    return report | verdict(bench.case, report)


def median_step(side: dict[str, Any]) -> float:
    """Median seconds of the steps after the warm-up."""
    return statistics.median(side["step_s"][min(WARM_UP, len(side["step_s"]) - 1) :])


def figures(found: list[dict[str, Any]], flops: float, peak: float) -> dict[str, Any]:
    """Medians over the rounds, the spread of the step, and what share of the peak a step reaches."""
    steps = sorted(median_step(one) for one in found)
    step_s = statistics.median(steps)
    return {
        "step_s": round(step_s, 4), "spread": [round(steps[0], 4), round(steps[-1], 4)],
        "whole_s": round(statistics.median(one["loop_s"] / len(one["step_s"]) for one in found), 4),
        "of_peak": round(flops / step_s / peak, 3), "peak_gib": round(max(one["peak_gib"] for one in found), 2),
    }


def verdict(case: Case, report: dict[str, Any]) -> dict[str, Any]:
    """Ratios of step and whole, differences of the losses, and what was missed."""
    ours, found, missed = report["sides"]["tuner"], {}, []
    for side, goal in zip(("trl, defaults", "trl, best"), case.goals, strict=True):
        other = report["sides"][side]
        difference = largest_difference(report["loss"]["tuner"], report["loss"][side])
        found[side] = {
            "ratio_step": round(other["step_s"] / ours["step_s"], 2),
            "ratio_whole": round(other["whole_s"] / ours["whole_s"], 2),
            "loss_difference": round(difference, 5),
        }
        if found[side]["ratio_step"] < goal:
            missed.append(f"{side}: {found[side]['ratio_step']} < {goal}")
        if difference > LOSS_ALLOWED["lora" if case.lora else "full"]:
            missed.append(f"{side}: losses differ by {difference:.3g}")
    return {"against": found, "missed": missed}


def largest_difference(a: list[float], b: list[float]) -> float:
    """Of two loss curves, over their first 20 steps."""
    return max(abs(x - y) for x, y in zip(a[:20], b[:20], strict=True))


def parity(bench: Bench) -> dict[str, Any]:
    """The same curve as TRL: in fp32 step by step, in bf16 within what another order of the rows changes."""
    short, long = (replace(bench.case, **workload) for workload in (EXACT, ROUNDED))
    bench = replace(bench, lr=PARITY_LR)
    exact = replace(bench, case=short, precision="fp32")
    exact.prepare()
    plain = {"bf16": False, "gradient_checkpointing": False}
    difference = largest_difference(exact.ours()["loss"], exact.peer(plain)["loss"])
    say(f"fp32, {short.steps} steps: largest difference {difference:.2e}")
    bf16 = replace(bench, case=long, precision="bf16")
    bf16.prepare()
    ours = windows(bf16.ours()["loss"])
    peers = [windows(bf16.peer(bf16.best(), order)["loss"]) for order in (None, 1, 2)]
    apart = [abs(a - b) for a, b in zip(ours, peers[0], strict=True)]
    spread = [max(found) - min(found) for found in zip(*peers, strict=True)]
    missed = [f"fp32: {difference:.2e} > 1e-3"] * (difference > 1e-3)
    missed += [f"bf16: {a:.4f} apart > spread {b:.4f}" for a, b in zip(apart, spread, strict=True) if a > b]
    return {
        "machine": machine(bench.device), "fp32_largest_difference": difference,
        "bf16_means": {"tuner": ours, "trl": peers}, "bf16_apart": apart, "bf16_spread_of_orders": spread,
        "missed": missed,
    }


def windows(losses: list[float]) -> list[float]:
    """Means of 50 steps each."""
    return [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def _table(report: dict[str, Any]) -> None:
    say(f"\n{report['case']}: {report['tokens_per_step']:,.0f} tokens a step, {report['steps']} steps")
    say(f"{'':16} {'s a step':>9} {'spread':>17} {'whole':>8} {'of peak':>8} {'GiB':>6}")
    for side, one in report["sides"].items():
        low, high = one["spread"]
        say(
            f"{side:16} {one['step_s']:9.3f} {f'{low:.3f} - {high:.3f}':>17} {one['whole_s']:8.3f} "
            f"{one['of_peak']:8.1%} {one['peak_gib']:6.2f}"
        )
    for side, one in report["against"].items():
        say(
            f"against {side:16} step {one['ratio_step']:.2f}x, whole {one['ratio_whole']:.2f}x; "
            f"losses differ by at most {one['loss_difference']:.1e}"
        )
    say("; ".join(report["missed"]) or "every goal reached")


def main() -> int:
    """Run one case and print its report."""
    smollm2 = ROOT / ".demo" / "smollm2"
    options = asked(
        __doc__, {"case": one_of([*CASES, "parity"])}, rounds=3, device=one_of(["cpu", "cuda"], "cpu"),
        model=(smollm2 if smollm2.is_dir() else Path, "directory of SmolLM2, as tools/build_smollm2.py makes it"),
        steps=(int, "steps of each run; the first 3 are warm-up"),
        prefix=("", "runs each measured command, such as taskset -c 0,1"),
    )
    case = CASES["smollm2-full" if options.case == "parity" else options.case]
    if case.shape is None and options.model is None:
        raise SystemExit("--model names the directory of SmolLM2")
    if options.steps is not None:
        case = replace(case, steps=options.steps)
    with workplace() as work:
        model = options.model
        if case.shape is not None:
            model = work / "model"
            write_model(case.shape, model)
        bench = Bench(case, model.absolute(), work, options.device, shlex.split(options.prefix))
        report = parity(bench) if options.case == "parity" else measure(bench, options.rounds)
    if options.case != "parity":
        _table(report)
    print(json.dumps(report))
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
