"""Every preference loss of `tuner train` against TRL's: the same pairs, the same model, 20 steps in fp32.

    python -m tools.preference_vs_trl [--model DIR] [--only NAME ...] [--trl-python PYTHON] [--trl-path DIR]

Each side runs in a process of its own, with its own Python: ours calls `tuner.train`, which is what the command calls,
with one recipe after the other; TRL's is `preference_trl.py`, which needs `trl` (`--trl-python` names a Python that has
it, or `--trl-path` a directory that holds it). The pairs are real ones (tools/real_preferences.py), prepared by
`tuner.prepare_data`; TRL gets the very token ids and the same boundary between prompt and answer, in the same order,
four pairs a step, without packing. Without `--model` it is a tiny Llama.

Losses of the 20 steps differ by at most 1e-4 (of the loss, where that is above 1), or the table says why not. What
differs is shown to be that and nothing else, in a case that leaves it out, where the losses meet: one micro-batch a
step, a cross-entropy of answers alone, the same partners for KTO's baseline, smaller steps for sppo. A table goes to
stderr, one JSON object to stdout; exit 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import real_preferences as real
from tools.commands import ROOT, asked, read_lines, some, workplace, write_lines
from tools.tables import beside

if TYPE_CHECKING:
    from tuner.data.prepared import Row

STEPS, PAIRS, BOUND, LR = 20, 4, 1e-4, 5e-4
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Case:
    """One loss on both sides, and how many micro-batches a step has on theirs."""

    name: str
    method: dict[str, Any]
    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    accumulated: int = 1
    apart: str | None = None
    """Why the losses may differ by more than the bound; None where they may not."""
    answers_only: bool = False
    """Whether TRL's cross-entropy is kept to answers."""
    lr: float = LR
    partners: bool = False
    """Whether TRL takes the mismatched answers of KTO's baseline from us."""


CASES = tuple(Case(**one) for one in beside(__file__))


@dataclass
class Comparison:
    """Where files lie, and how TRL is run."""

    model: Path
    work: Path
    sources: Path
    trl_python: str
    trl_path: str | None

    @property
    def scores(self) -> Path:
        """The model with a score in place of its output layer, from which reward models start on both sides."""
        return self.work / "scores"

    def rows(self, case: Case) -> Path:
        """The rows of a case, written as messages."""
        unpaired = case.method["kind"] == "kto"
        name = "labelled" if unpaired else "pairs"
        path = self.work / f"{name}.jsonl"
        if not path.is_file():
            items = real.shortest(real.labelled(self.sources) if unpaired else real.pairs(self.sources)[:300], 80)
            items = interleaved(items) if unpaired else items
            write_lines(path, items)
        return path

    def recipe(self, case: Case) -> dict[str, Any]:
        """What the command is given; all else is its default."""
        return {
            "output_dir": str(self.work / case.name.replace(" ", "-").replace(",", "")),
            "model": {"name_or_path": str(self.scores if case.trainer == "reward" else self.model)},
            "method": {"beta": 0.1} | case.method if case.trainer != "reward" else case.method,
            "data": {
                "train": str(self.rows(case)), "max_length": MAX_LENGTH, "packing": False, "shuffle": False,
                "cache_dir": str(self.work / "cache"),
            },
            "train": {
                "duration": f"{STEPS} steps", "global_batch_size": PAIRS, "micro_batch_size": PAIRS,
                "precision": "fp32", "device": "cpu",
            },
            "optimizer": {"lr": case.lr, "betas": [0.9, 0.999], "weight_decay": 0.0},
            "schedule": {"kind": "constant", "warmup": "never"},
            "checkpoint": {"at_end": case.trainer == "reward"},
        }

    def ours(self, cases: list[Case]) -> dict[str, Any]:
        """Prepare and train: of each case the losses, and the token ids that it trained on."""
        job = self.work / "ours.json"
        recipes = {case.name: self.recipe(case) for case in cases}
        job.write_text(json.dumps(recipes), encoding="utf-8")
        command = [sys.executable, "-m", "tools.preference_vs_trl", "--ours", str(job)]
        return dict(run_json(command, {"PYTHONPATH": str(ROOT)}))

    def theirs(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's side of all cases, in one process."""
        return dict(run_trl([self.trl_python], self.trl_path, self.model, self.work, runs)["runs"])

    def run_of(self, case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What TRL is asked for: the same ids, order, batch, optimizer and rate."""
        path = self.work / f"{case.name}.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        kind = {"beta": case.method.get("beta", 0.1)} if case.trainer != "reward" else {}
        same = {
            "per_device_train_batch_size": PAIRS // case.accumulated, "gradient_accumulation_steps": case.accumulated,
            "learning_rate": case.lr, "lr_scheduler_type": "constant", "adam_beta2": 0.999, "max_grad_norm": 1.0,
            "max_length": MAX_LENGTH, "bf16": False, "gradient_checkpointing": False,
        }
        return {
            "name": case.name, "trainer": case.trainer,
            "model": str(self.scores if case.trainer == "reward" else self.model), "rows": str(path), "steps": STEPS,
            "answers_only": case.answers_only, "partners": case.partners, "settings": {**same, **kind, **case.settings},
        }


def train_ours(job: Path) -> dict[str, Any]:
    """Our side, in a process of its own: every recipe of the job trained, one after the other."""
    from tuner import prepare_data, train

    found = {}
    for name, recipe in json.loads(job.read_text(encoding="utf-8")).items():
        prepared = prepare_data(recipe).path
        run = train(recipe, prepared=prepared, quiet=True).run_dir
        steps = read_lines(Path(run) / "metrics.jsonl", "train")
        rows = token_rows(Path(prepared), recipe["method"]["kind"])
        found[name] = {"loss": [line["loss"] for line in steps], "rows": rows}
        print(f"{name}: {steps[0]['loss']:.6f} -> {steps[-1]['loss']:.6f}", file=sys.stderr, flush=True)
    return found


def write_scores(model: Path, directory: Path) -> None:
    """The model with a score that is drawn, in a directory that both sides start from."""
    import shutil

    import torch

    from tuner.model.build import ModelSpec, build_model

    build_model(ModelSpec(str(model), head="score"), torch.float32, 0).save_pretrained(directory)
    for path in model.glob("*token*"):
        shutil.copy(path, directory)
    for path in model.glob("*.jinja"):
        shutil.copy(path, directory)


def interleaved(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Desirable and undesirable answers by turns, so that every step has both."""
    good, bad = ([item for item in items if item["label"] is label] for label in (True, False))
    return [item for pair in zip(good, bad, strict=False) for item in pair]


def token_rows(prepared: Path, kind: str) -> list[dict[str, Any]]:
    """The prepared documents as TRL takes them: ids of the prompt up to the first trained token, and of the answer."""
    from tuner.data.prepared import open_prepared

    found = []
    prepared_rows = open_prepared(prepared).train
    for row in prepared_rows:
        parts = split_answers(row)
        if kind == "kto":
            ((prompt, answer, _),) = parts
            ((_, partner, _),) = split_answers(prepared_rows.mismatched(row))
            ids = {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": partner}
            found.append({**ids, "label": bool(row.columns["label"][0])})
            continue
        (prompt, chosen, whole), (_, rejected, other) = parts
        texts = {"prompt": "", "chosen": "", "rejected": ""}
        if kind == "reward":
            found.append({"chosen_ids": prompt + whole, "rejected_ids": prompt + other})
        else:
            found.append({**texts, "prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return found


def split_answers(row: Row) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each document of a row: its prompt, its answer up to the last trained token, and all after the prompt."""
    parts = []
    for end, length in zip(row.lengths.cumsum().tolist(), row.lengths.tolist(), strict=True):
        ids, trained = row.input_ids[end - length : end].tolist(), row.trained[end - length : end].tolist()
        first = trained.index(True)
        last = length - trained[::-1].index(True)
        if not all(trained[first:last]):
            raise SystemExit("an answer with a gap: TRL has no such mask")
        parts.append((ids[:first], ids[first:last], ids[first:]))
    return parts


def compare(comparison: Comparison, cases: list[Case]) -> list[dict[str, Any]]:
    """Both sides of every case, and their largest difference."""
    ours = comparison.ours(cases)
    theirs = comparison.theirs([comparison.run_of(case, ours[case.name]["rows"]) for case in cases])
    report = []
    for case in cases:
        a, b = ours[case.name]["loss"], theirs[case.name]["loss"]
        first = abs(a[0] - b[0])
        largest = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a, b, strict=True))
        report.append(
            {
                "case": case.name, "first_step": first, "largest": largest, "moved": abs(a[-1] - a[0]),
                "apart": case.apart, "missed": case.apart is None and largest > BOUND, "ours": a, "trl": b,
            }
        )
    return report


def write_tiny(directory: Path, tokenizer: Path) -> None:
    """A tiny Llama with random weights and SmolLM2's tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, directory)


def run_json(command: list[str], more: dict[str, str]) -> Any:
    """What a command prints last, with more variables in its environment. Raises SystemExit where it fails."""
    environment = {**os.environ, **more}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_trl(python: list[str], path: str | None, model: Path, work: Path, runs: list[dict[str, Any]]) -> Any:
    """What TRL says of these runs, in one process of a Python that may need a path to it."""
    job = work / "job.json"
    job.write_text(json.dumps({"model": str(model), "output_dir": str(work / "trl"), "runs": runs}), encoding="utf-8")
    words = [*python, str(ROOT / "tools" / "preference_trl.py"), str(job)]
    return run_json(words, {"PYTHONPATH": path} if path else {})


def main() -> int:
    """Compare, print the table and the report."""
    options = asked(
        __doc__, model=(Path, "a model directory; a tiny one where it is not given"),
        smollm2=(ROOT / ".demo" / "smollm2", "whose tokenizer is taken"),
        sources=(ROOT / ".demo" / "other-tools", "where packages are"),
        only=some(case.name for case in CASES), trl_python=sys.executable, trl_path=str,
        ours=(Path, argparse.SUPPRESS),
    )
    if options.ours is not None:
        print(json.dumps(train_ours(options.ours)))
        return 0
    cases = [case for case in CASES if case.name in options.only]
    with workplace() as work:
        model = options.model
        if model is None:
            model = work / "tiny"
            write_tiny(model, options.smollm2)
        comparison = Comparison(model.absolute(), work, options.sources, options.trl_python, options.trl_path)
        if any(case.trainer == "reward" for case in cases):
            write_scores(comparison.model, comparison.scores)
        report = compare(comparison, cases)
    for one in report:
        verdict = "MISSED" if one["missed"] else one["apart"] or ""
        print(f"{one['case']:28} first {one['first_step']:.1e}, largest {one['largest']:.1e} of a change of "
              f"{one['moved']:.3f}  {verdict}", file=sys.stderr)  # fmt: skip
    print(json.dumps(report))
    return 1 if any(one["missed"] for one in report) else 0


if __name__ == "__main__":
    raise SystemExit(main())
