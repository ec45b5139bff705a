"""What the shipped preference recipes teach SmolLM2: figures on held-out notes, before and after training.

    python -m tools.preference_task [--smollm2 DIR] [--only dpo orpo simpo reward] [--work DIR]

Trains the shipped recipes on recipes/data/preferences.jsonl with the real command, and measures them on notes whose
names and wordings never occur in it (tools/preference_rows.py): how often the implicit reward of the short answer is
the higher one, and what share of the model's own answers is one JSON object with the keys that were asked for and
nothing else, before and after. A reward model is measured by how often it ranks the short answer first. About ten
minutes on two cores. A table goes to stderr, one JSON object to stdout; exit 1 where a goal is missed: an accuracy
above 90 %, more valid answers than before.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked, environment, read_lines, say, some, tuner, workplace, write_lines
from tools.demo.score import answer, parse
from tools.preference_rows import HELD_OUT_ROWS, Row, rows

METHODS: dict[str, tuple[str, ...]] = {
    "dpo": ("smollm2_dpo_cpu",), "orpo": ("smollm2_dpo_cpu", "--method.kind", "orpo", "--method.sft_weight", "null"),
    "simpo": ("smollm2_dpo_cpu", "--method.kind", "simpo"), "reward": ("smollm2_reward_cpu",),
}
"""Recipes with what is changed in them."""
ACCURACY_GOAL = 0.9


def is_valid(text: str, wanted: dict[str, Any]) -> bool:
    """Whether an answer is one JSON object with the wanted keys, and nothing else."""
    found = parse(text, lenient=False)
    return found is not None and set(found) == set(wanted)


def share_valid(answers: Sequence[str], held_out: Sequence[Row]) -> float:
    """The share of answers that are valid."""
    wanted = [json.loads(row["chosen"][0]["content"]) for row in held_out]
    return sum(is_valid(text, keys) for text, keys in zip(answers, wanted, strict=True)) / len(wanted)


def answers_of(model: str, held_out: Sequence[Row]) -> list[str]:
    """What a model or a run answers to the held-out notes, greedily."""
    from tuner.generate import load_generator

    generator = load_generator(model)
    with contextlib.redirect_stderr(sys.stderr):
        texts = [
            str(generator.tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True))
            for row in held_out
        ]
        return answer(generator.model, generator.tokenizer, texts)


def train(name: str, smollm2: Path, work: Path) -> dict[str, Any]:
    """Train one recipe; its last evaluation on the held-out notes, and where the run is."""
    run = work / name
    held_out = work / "held-out.jsonl"
    recipe, *changes = METHODS[name]
    words = ["train", recipe, *changes]
    words += ["--model.name_or_path", str(smollm2), "--data.eval", str(held_out), "--output_dir", str(run)]
    words += ["--eval.every", "never", "--eval.at_start", "false", "--eval.samples", "0"]
    start = time.perf_counter()
    tuner(work, *words, env=environment(work / "cache", threads=None))
    lines = read_lines(run / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "eval"][-1]
    return {
        "run": str(run), "seconds": round(time.perf_counter() - start, 1),
        "steps": sum(line["kind"] == "train" for line in lines), "accuracy": last["accuracy"], "margin": last["margin"],
    }


def main() -> int:
    """Train, measure, print the table and the report."""
    given = asked(
        __doc__, smollm2=ROOT / ".demo" / "smollm2", only=some(list(METHODS), ["dpo", "reward"]),
        work=(Path, "keep the runs here"),
    )
    held_out = rows("held-out", HELD_OUT_ROWS)
    report: dict[str, Any] = {"held_out": len(held_out), "missed": []}
    with workplace(given.work) as work:
        work.mkdir(parents=True, exist_ok=True)
        write_lines(work / "held-out.jsonl", held_out)
        smollm2 = given.smollm2.absolute()
        if set(given.only) - {"reward"}:
            report["valid_before"] = share_valid(answers_of(str(smollm2), held_out), held_out)
            say(f"before         {report['valid_before']:6.1%} valid answers")
        for name in given.only:
            found = train(name, smollm2, work)
            if name != "reward":
                found["valid"] = share_valid(answers_of(found["run"], held_out), held_out)
            report[name] = found
            valid = "" if name == "reward" else f", {found['valid']:6.1%} valid answers"
            say(f"{name:14} {found['accuracy']:6.1%} ranked right{valid}; {found['steps']} steps, {found['seconds']} s")
            if found["accuracy"] <= ACCURACY_GOAL:
                report["missed"].append(f"{name}: accuracy {found['accuracy']:.1%}")
            if name != "reward" and found["valid"] <= report["valid_before"]:
                report["missed"].append(f"{name}: {found['valid']:.1%} valid answers")
    print(json.dumps(report))
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
