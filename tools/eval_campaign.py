"""Scores of tasks held to plain transformers, to lm-evaluation-harness, and to themselves on two processes.

    python -m tools.eval_campaign [--model .demo/smollm2] [--items 320] [--tasks DIR] [--place DIR]

Makes the three tasks of `tools/eval_tasks.py` (`--tasks`: takes those that are there), scores them by `tuner eval` on
one and on two processes, and by `tools/eval_plain.py`, item by item; where lm_eval can be imported, by its own model
class, too. Then trains a few steps with and without evaluations of them: the checkpoints must have the same SHA-256.
Writes `report.json`; exits with 1 where anything differs.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from tools import eval_tasks
from tools.commands import ROOT, asked, done, environment, read_lines, run, write_lines

PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HARNESS_FIGURES = ("acc", "acc_norm")


def main() -> int:
    """Run the parts."""
    options = asked(
        __doc__, model=ROOT / ".demo" / "smollm2", place=ROOT / ".demo" / "evaluations", tasks=Path,
        items=eval_tasks.ITEMS, only=["plain", "processes", "harness", "training"],
    )
    options.place.mkdir(parents=True, exist_ok=True)
    directory = options.tasks or options.place / "tasks"
    if options.tasks is None:
        eval_tasks.make(directory, options.items)
    tasks, model = sorted(directory.glob("*.jsonl")), options.model.resolve()
    report: dict[str, Any] = {"one process": scored(model, tasks, options.place / "one", 1)}
    parts = {
        "plain": lambda: plain(model, tasks, options.place / "one"),
        "processes": lambda: two_processes(model, tasks, options.place),
        "harness": lambda: harness(model, directory / "functions.jsonl", options.place),
        "training": lambda: training(model, tasks, options.place),
    }
    for name in options.only:
        report[name] = parts[name]()
        print(f"{name}: {json.dumps(report[name])}", flush=True)
    (options.place / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return int(any(part.get("problems") for part in report.values()))


def scored(model: Path, tasks: list[Path], output: Path, processes: int) -> dict[str, Any]:
    """The figures of `tuner eval`, whose results go to a directory."""
    start = [] if processes == 1 else PROCESSES
    words = ["eval", str(model), *(word for task in tasks for word in ("--tasks", str(task)))]
    flags = ["--output", str(output), "--train.precision", "fp32", "--json"]
    started = time.monotonic()
    metrics: dict[str, Any] = json.loads(python([*start, "-m", "tuner", *words, *flags]).splitlines()[-1])["metrics"]
    return metrics | {"whole_s": round(time.monotonic() - started, 1)}


def plain(model: Path, tasks: list[Path], ours: Path) -> dict[str, Any]:
    """Each item by transformers alone."""
    started = time.monotonic()
    done = run([str(ROOT / "tools" / "eval_plain.py"), str(model), *map(str, tasks), "--against", str(ours)], None)
    said = done.stdout.splitlines()
    found = [line for line in said if line.startswith("item")] or [done.stderr[-500:]]
    problems = found if done.returncode else []
    return {"problems": problems, "said": said, "seconds": round(time.monotonic() - started, 1)}


def two_processes(model: Path, tasks: list[Path], place: Path) -> dict[str, Any]:
    """The results of two processes are those of one: the same bits where likelihoods are, the same answers."""
    figures = scored(model, tasks, place / "two", 2)
    problems = [
        f"{task.name}: another SHA-256 on two processes"
        for task in tasks
        if digest(place / "one" / task.name) != digest(place / "two" / task.name)
    ]
    return {"problems": problems, "figures": figures}


def harness(model: Path, task: Path, place: Path) -> dict[str, Any]:
    """The choices of one task by lm-evaluation-harness: its own model class, and tuner's."""
    if importlib.util.find_spec("lm_eval") is None:
        return {"problems": [], "left out": "lm_eval is not installed"}
    written = place / "harness_functions.yaml"
    written.write_text(
        "task: harness_functions\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {task.resolve()}}}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: prompt\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list:\n- {metric: acc}\n- {metric: acc_norm}\n"
    )
    from lm_eval import simple_evaluate

    arguments = f"pretrained={model},dtype=float32,max_length=2048"
    theirs = simple_evaluate(
        model="hf", model_args=arguments, tasks=[str(written)], bootstrap_iters=0, batch_size=8, device="cpu"
    )
    said = python([
        "-m", "tuner", "eval", str(model), "--tasks", f"lm_eval:{written}", "--output", str(place / "harness"),
        "--train.precision", "fp32", "--json",
    ])  # fmt: skip
    ours = json.loads(said.splitlines()[-1])["metrics"]
    items = read_lines(place / "harness" / "harness_functions.jsonl")
    samples = theirs["samples"]["harness_functions"]
    problems = [
        f"item {number}: {name} {sample[name]} by lm_eval, {item['figures'][name]} by tuner"
        for number, (sample, item) in enumerate(zip(samples, items, strict=True), 1)
        for name in HARNESS_FIGURES
        if sample[name] != item["figures"][name]
    ]
    own = theirs["results"]["harness_functions"]
    figures = {name: [own[f"{name},none"], ours[f"harness_functions/{name}"]] for name in HARNESS_FIGURES}
    return {"problems": problems, "items": len(items), "figures": figures}


def training(model: Path, tasks: list[Path], place: Path) -> dict[str, Any]:
    """A few steps with evaluations of the tasks and without: the same weights; what the evaluations cost."""
    rows = [{"text": f"{number} " * 40} for number in range(64)]
    write_lines(place / "rows.jsonl", rows)
    base = {
        "model": {"name_or_path": str(model)}, "method": {"kind": "pretrain"},
        "data": {"train": str(place / "rows.jsonl"), "max_length": 512},
        "train": {"duration": "4 steps", "global_batch_size": 2, "precision": "fp32", "device": "cpu"},
        "checkpoint": {"every": "never"},
    }  # fmt: skip
    evaluated = {"every": "2 steps", "tasks": [{"task": str(task), "max_items": 50} for task in tasks]}
    found: dict[str, str] = {}
    for name, section in (("without", {}), ("with", {"eval": evaluated})):
        recipe = place / f"{name}.yaml"
        run = place / "runs" / name
        recipe.write_text(json.dumps(base | section | {"output_dir": str(run)}))
        shutil.rmtree(run, ignore_errors=True)
        python(["-m", "tuner", "train", str(recipe)])
        found[name] = weights_digest(run / "checkpoints" / "step-4")
    lines = read_lines(place / "runs" / "with" / "metrics.jsonl")
    costs = [line["tasks_s"] for line in lines if line["kind"] == "eval"]
    problems = [] if found["with"] == found["without"] else [f"weights differ: {found}"]
    steps = [line["step_s"] for line in lines if line["kind"] == "train"]
    return {"problems": problems, "sha256": found["with"], "tasks_s": costs, "step_s": steps}


def weights_digest(checkpoint: Path) -> str:
    """The SHA-256 of a checkpoint's tensors."""
    from tuner.checkpoint.load import content_sha256
    from tuner.checkpoint.open import open_checkpoint

    return content_sha256(open_checkpoint(checkpoint))


def python(words: list[str]) -> str:
    """The output of Python with these words. Raises RuntimeError where it fails."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return done(words, None, environment(threads=None, PYTHONPATH=paths))


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
