"""The whole pipeline on a real model, live: what `make demo` runs. Exits with 1 when a goal is missed."""

import json
import math
import random
import shlex
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tools.commands import STOPPED, read_lines
from tools.demo import task, training
from tools.demo.score import NEW_TOKENS, score
from tools.demo.shell import PLAIN_PYTHON, ROOT, Missed, Stage, bold, say, table
from tuner.runtime.device import device_facts, measured_peak

STEPS = 12
CHECKPOINT_EVERY = 3
TWIN_STEPS = 6
"""Of the run that is killed: it ends with a checkpoint that the unbroken run has, too."""
FLOPS, STARTS_S = 2.7e13, 260.0
"""What the demo takes as if all were large products, at their rate on this machine, and the seconds of all that is
no faster with bf16: 180 of such as the starts of its commands, which with the products are the five minutes that two
cores without bf16 took, and the 200 seconds of two with it, and 80 of a core for what llama.cpp answers."""
SLOWEST = 1.3
"""What it takes where the machine has other work, too: two cores with bf16 took up to 255 seconds."""
BASE_ROWS = 10
SERVED_GOAL = 0.6
"""Of all held-out messages, the share that the served file is right about in every field."""
GOALS = {
    ("unseen names", "valid"): 0.98,
    ("unseen names", "exact"): 0.70,
    ("unseen names and wordings", "fields"): 0.60,
}
SAME_LOGITS, OTHER_LOGITS = 1e-5, 1e-2
PROMPT = "To Oslo, please: 5 garden hoses. Invoice of 98 dollars goes to Wanda Zhou."

RECIPE = f"""\
version: 1
model:
  name_or_path: {{model}}
data:
  train: train.jsonl
  eval: eval.jsonl
  max_length: 320
train:
  duration: {STEPS} steps
  global_batch_size: 2
  micro_batch_size: 2
optimizer:
  lr: 4e-4
schedule:
  warmup: 2 steps
eval:
  every: {STEPS} steps
  samples: 2
checkpoint:
  every: {CHECKPOINT_EVERY} steps
  keep: 3
"""

TRUTHS = """
import sys, pathlib
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import open_checkpoint
for path in sys.argv[1:]:
    info = open_checkpoint(pathlib.Path(path))
    print(info.step, content_sha256(info))
"""


def main() -> int:
    """Play every part in order; return the exit code."""
    stage = Stage(work=ROOT / ".demo" / "work", model=ROOT / ".demo" / "smollm2")
    started = time.monotonic()
    least, most = expected_minutes()
    say(f"This takes {least} to {most} minutes on this machine; what it writes is in .demo/work.")
    try:
        play(stage)
    except Missed as missed:
        say(f"\n{bold('MISSED')}  {missed}")
        return 1
    install = installed_seconds()
    say(f"\n    install {install:.0f} s (once) · demo {time.monotonic() - started:.0f} s")
    return 0


def expected_minutes() -> tuple[int, int]:
    """The fewest and the most, from the rate at which this machine multiplies matrices."""
    rate = measured_peak("cpu", "bf16" if device_facts("cpu").bf16_fast else "fp32", 0)
    minutes = (STARTS_S + FLOPS / rate) / 60
    return max(math.floor(minutes), 1), math.ceil(SLOWEST * minutes)


def play(stage: Stage) -> None:
    """The demo from the first row to the last table."""
    write_inputs(stage)
    with stage.part("What is trained: the masks, on the rows of this task"):
        if sys.stdout.isatty():  # a pipe would get a line of JSON for each token
            stage.tuner("prepare-data", "extract.yaml", "--explain", "1")
        else:
            stage.tuner("prepare-data", "extract.yaml")
    with stage.part("What it will need: peak memory and time, measured over a few steps"):
        stage.tuner("profile", "extract.yaml", "--measure", "1")
    run, twin = stage.work / "runs" / "extract", stage.work / "runs" / "broken"
    with stage.part(f"Training, {STEPS} steps, with a held-out answer before and after; [8] counts how many are right"):
        training.run(stage, ["train", "extract.yaml"])
    with stage.part("The same training, killed with -9 at a random step, resumed, and compared"):
        break_and_resume(stage, run, twin)
    exported = stage.work / "exported"
    with stage.part("Export to a Hugging Face directory, verified"):
        stage.tuner("export-hf", "runs/extract", "--dtype", "fp32", "--output", "exported")
    with stage.part("The exported directory in plain transformers, where tuner is not installed"):
        plain_logits(stage, run, exported)
    with stage.part("Base and trained model, side by side"):
        asked = ["--system", task.INSTRUCTION, "--prompt", PROMPT, "--max-new-tokens", "48"]
        stage.tuner("generate", "exported", "--compare", "base", *asked)
    with stage.part(f"Scores on {2 * task.HELD_OUT_ROWS} held-out messages"):
        before, after = scored(stage, "base", stage.model, BASE_ROWS), scored(stage, "trained", exported, None)
        results(run, before, after)
    if find_spec("xllamacpp"):
        with stage.part("The same as a GGUF file of 8 bits, served by llama.cpp: the same messages"):
            stage.tuner("export-gguf", "runs/extract", "--type", "q8_0", "--output", "extract.gguf")
            as_served(stage)
    say(f"\n{bold('Talk to it')}, an order at a time; Ctrl-D ends")
    words = ["chat", ".demo/work/exported", "--system", task.INSTRUCTION, "--temperature", "0"]
    say(f"    {shlex.join(['.venv/bin/tuner', *words])}")
    say(f"\n{bold('The same with your own rows')}")
    say("    .venv/bin/tuner init -m .demo/smollm2 -d YOUR.jsonl > mine.yaml")
    say("    .venv/bin/tuner train mine.yaml | .venv/bin/tuner export-hf -")
    missed = [
        f"{part}: {figure} {after[part][figure]:.1%} < {goal:.0%}"
        for (part, figure), goal in GOALS.items()
        if after[part][figure] < goal
    ]
    if missed:
        raise Missed("; ".join(missed))


def write_inputs(stage: Stage) -> None:
    """Start from an empty work directory holding the rows and the recipe."""
    shutil.rmtree(stage.work, ignore_errors=True)
    stage.work.mkdir(parents=True)
    task.write_jsonl(stage.work / "train.jsonl", task.train_rows())
    task.write_jsonl(stage.work / "eval.jsonl", task.eval_rows())
    recipe = RECIPE.format(model=stage.model)
    (stage.work / "extract.yaml").write_text(recipe, encoding="utf-8")
    say(f"{bold('extract.yaml')}\n" + "".join(f"    {line}\n" for line in recipe.splitlines()))


def break_and_resume(stage: Stage, run: Path, twin: Path) -> None:
    """Train again into `twin`, kill that, resume it, and require the weights of the unbroken run."""
    kill_at = random.SystemRandom().randint(CHECKPOINT_EVERY + 1, TWIN_STEPS - 2)
    say(f"    kill -9 is due after step {kill_at}")
    without = ["--eval.every", "never", "--eval.at_start", "false", "--eval.samples", "0"]
    words = ["train", "extract.yaml", "--output_dir", f"runs/{twin.name}", *without]
    step = training.run(stage, words, killed=(twin, kill_at))
    say(f"    {bold('killed')} after step {step}; resumed, it trains up to the next checkpoint of the unbroken run")
    saved = max(int(path.parent.name.removeprefix("step-")) for path in twin.glob("checkpoints/step-*/manifest.json"))
    until = TWIN_STEPS if max(step, saved) < TWIN_STEPS else STEPS
    stop = [] if until == STEPS else ["--train.stop_after", f"{until - saved} steps"]
    training.run(stage, ["resume", f"runs/{twin.name}", *stop], expected=STOPPED if stop else 0)
    checkpoints = [str(one / "checkpoints" / f"step-{until}") for one in (run, twin)]
    lines = stage.command([sys.executable, "-c", TRUTHS, *checkpoints]).splitlines()
    unbroken, broken = (line.split() for line in lines)
    say(f"    unbroken  step {unbroken[0]}  SHA-256 {unbroken[1]}")
    say(f"    resumed   step {broken[0]}  SHA-256 {broken[1]}")
    if unbroken != broken:
        raise Missed("the resumed run has other weights than its unbroken twin")
    say(f"    {bold('identical')}")


def plain_logits(stage: Stage, run: Path, exported: Path) -> None:
    """Require the recorded logits from the exported directory, and others from the base."""
    (checkpoint,) = [path.parent for path in run.glob(f"checkpoints/step-{STEPS}/manifest.json")]
    script = ROOT / "tools" / "demo" / "plain.py"
    probe = checkpoint / "probe.safetensors"
    words = [str(PLAIN_PYTHON), "-I", str(script), str(exported), str(stage.model), str(probe)]
    report = json.loads(stage.command(words))
    say(f"    {report['prompts']} prompts, largest difference from the trained model's logits, relative")
    say(f"    exported {report['exported']:.1e} · base {report['base']:.1e}")
    if report["prompts"] != 20 or report["exported"] > SAME_LOGITS or report["base"] < OTHER_LOGITS:
        raise Missed("the exported directory is not the trained model")


def scored(stage: Stage, name: str, model: Path, limit: int | None) -> dict[str, dict[str, float]]:
    """The scores of one model on both held-out sets, on the first `limit` messages of each."""
    rows = {part: items[:limit] for part, items in task.held_out().items()}
    source, out = stage.work / f"{name}-rows.json", stage.work / f"{name}-scores.json"
    source.write_text(json.dumps(rows), encoding="utf-8")
    lenient = ["--lenient"] if name == "base" else []
    dtype = "bfloat16" if device_facts("cpu").bf16_fast else "float32"  # slow without instructions
    stage.module("score", str(model), str(source), str(out), "--dtype", dtype, *lenient)
    scores: dict[str, dict[str, float]] = json.loads(out.read_text(encoding="utf-8"))["scores"]
    return scores


def as_served(stage: Stage) -> None:
    """Require that what is served is right as often as the trained model, but for one answer, and often enough."""
    rows, out = stage.work / "trained-rows.json", stage.work / "served-scores.json"
    stage.module("served", "extract.gguf", str(rows), str(out), str(NEW_TOKENS))
    said = [json.loads((stage.work / f"{name}-scores.json").read_text())["answers"] for name in ("trained", "served")]
    right, same, asked = [0, 0], 0, 0
    for part, items in json.loads(rows.read_text(encoding="utf-8")).items():
        wanted = [json.loads(row["messages"][-1]["content"]) for row in items]
        same += sum(one == other for one, other in zip(*(answers[part] for answers in said), strict=True))
        asked += len(wanted)
        for at, answers in enumerate(said):
            right[at] += round(len(wanted) * score(answers[part], wanted, lenient=False)["exact"])
    say(f"    right in every field: served {right[1]}, trained {right[0]} of {asked} · the same answer to {same}")
    if abs(right[1] - right[0]) > 1 or right[1] < SERVED_GOAL * asked:
        raise Missed(f"the served file is not the trained model, or is right in less than {SERVED_GOAL:.0%}")


def results(run: Path, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> None:
    """Print the table before and after."""
    losses, counts = eval_losses(run), ((before, BASE_ROWS), (after, task.HELD_OUT_ROWS))
    rows: list[list[str]] = [["held-out loss", f"{losses[0]:.4f}", f"{losses[-1]:.4f}", ""]]
    for part in after:
        for figure, label in (("valid", "valid JSON"), ("fields", "fields right"), ("exact", "exact")):
            goal = GOALS.get((part, figure))
            wanted = f"{goal:.0%}" if goal else ""
            values = [f"{scores[part][figure]:.1%}" for scores in (before, after)]
            rows.append([f"{label}, {part}", *values, wanted])
    table(["", "base", "trained", "goal"], rows)
    right = [sum(round(scores[part]["exact"] * count) for part in scores) for scores, count in counts]
    asked = [len(scores) * count for scores, count in counts]
    say(f"    orders right in every field: base {right[0]} of {asked[0]} · trained {right[1]} of {asked[1]}")
    say(f"    base: {BASE_ROWS} messages of each set, the first JSON object anywhere in the answer counts")
    say(f"    trained: {task.HELD_OUT_ROWS} messages of each set, the whole answer must be the object")


def eval_losses(run: Path) -> list[float]:
    """The losses of every evaluation of a run, in order."""
    return [line["loss"] for line in read_lines(run / "metrics.jsonl", "eval")]


def installed_seconds() -> float:
    """How long the set-up took when it was made: both environments and the model."""
    stamps = (ROOT / ".venv" / ".installed", ROOT / ".venv-plain" / ".installed", ROOT / ".demo" / ".model")
    return sum(float(stamp.read_text()) for stamp in stamps if stamp.is_file())


if __name__ == "__main__":
    sys.exit(main())
