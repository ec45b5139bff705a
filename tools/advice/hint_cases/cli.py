"""What commands say of their arguments, and of what they read and write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.ladder.ladders import write_ladder_files
from tests.ladder.made import Truth
from tests.ladder.made import ladder as law
from tools.advice.hint_cases.runs import checkpoints, pairs
from tools.advice.hint_place import Case
from tools.advice.hint_words import RUN, Way

FIT = "profile r.yaml --fit --json > f"
FITTED = {"FILE": "f"}
DOCUMENT = '{"schema": 1, "command": "train", "status": "ok", "artifacts": {}}'
EXPORT = "runs/r/exports/step-2"
ADAPTER = f"{EXPORT}-adapter"
ROWS = "--data.eval rows.jsonl"
GENERATE = "generate runs/r --max-new-tokens 2"
PAIRS = {"data.train": "pairs.jsonl", "data.eval": "pairs.jsonl"}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
LADDER = {"model.init": "random", "train.duration": None, "train.global_batch_size": None, "data.eval": "rows.jsonl"}
REWARD = {"method.kind": "reward", **PAIRS}
SCORE = "eval runs/r --tasks {}.jsonl --output {}"


def of_run(site: str, words: str, *meant: Way, **more: Any) -> Case:
    """What a command says of a finished run."""
    return Case(f"cli/{site}", meant=meant, **{"start": "run", "words": words, **more})


def command(*lines: str) -> Way:
    """A way that is commands alone."""
    return {RUN: [*lines]}


def empty(place: Path) -> None:
    """A directory of nothing, and one of no results."""
    (place / "empty").mkdir()
    (place / "tasks").mkdir()
    (place / "tasks/t.jsonl").write_text((place / "t.jsonl").read_text())


def shut(place: Path) -> None:
    """Nothing can be written where the shell looks."""
    (place / "home").mkdir()
    (place / "home/.config").write_text("")


def damaged(place: Path) -> None:
    """The manifests of the prepared data, a copy of which is `entry`."""
    shutil.copytree(next((place / "cache/prepared").glob("[!.]*")), place / "entry")
    for path in [*place.glob("cache/*/*/manifest.json"), place / "entry/manifest.json"]:
        path.write_text("{")


def half_gone(place: Path) -> None:
    """The tensors of the last checkpoint."""
    next(checkpoints(place)[-1].glob("rank-*")).write_bytes(b"")


def hidden(place: Path) -> None:
    """Files to read in place of what was typed, and two wrong ones."""
    (place / "in").write_text("{}\n")
    (place / "talk").write_text("ab\n")
    (place / "prompts.txt").write_text("ab\n")


def moved(place: Path) -> None:
    """The base model is elsewhere."""
    (place / "model").rename(place / "moved")


def alone(place: Path) -> None:
    """An export that says neither where it came from nor how it was talked to."""
    shutil.copytree(place / EXPORT, place / "alone")
    (place / "alone/tuner.json").unlink()
    (place / "alone/chat_template.jinja").unlink()


def another_row(place: Path) -> None:
    """The rows of the run changed; others are there."""
    shutil.copy(place / "rows.jsonl", place / "other.jsonl")
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')


def points(place: Path) -> None:
    """Published points of a ladder."""
    lines = [f"{one.rung},{one.parameters:.0f},{one.tokens:.0f},{one.figures['loss']}" for one in law(Truth())]
    (place / "points.csv").write_text("\n".join(["rung,parameters,tokens,loss", *lines]) + "\n")


def ladder(place: Path) -> None:
    """A ladder of two rungs."""
    shutil.rmtree(place / "model")
    write_ladder_files(place)


def labels(place: Path) -> None:
    """Answers that are good or not."""
    rows = ({"prompt": f"{number} ", "completion": "ab", "label": number % 2 == 0} for number in range(24))
    (place / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


RECIPES = (
    of_run("command.py:_source", "config check", command(f"init -m {EXPORT} -d rows.jsonl > recipe.yaml"),
        start="exported", reading={"MODEL": EXPORT, "FILE": "rows.jsonl", "   or see: tuner recipes list": ""}),
    of_run("command.py:_source", "config check", command("recipes list"), start="model", instead=True,
        reading={"write one with: tuner init -m MODEL -d FILE > recipe.yaml": ""}),
    of_run("command.py:: write one with: tuner profile", "train r.yaml --dry-run --overrides f", command(FIT),
        start="model", dear=True, change=lambda place: (place / "f").write_text(DOCUMENT), reading=FITTED),
    of_run("command.py:: write one with: tuner profile", "train r.yaml --dry-run --overrides f", command(FIT),
        start="model", dear=True, reading=FITTED),
    of_run("command.py:_sound", "export-hf - --dry-run < in", command("train r.yaml --json > in"), start="model",
        change=hidden, reading={"use --json on the command before": "tuner train r.yaml --json > in"}, dear=True),
    of_run("init.py:_chosen: name yours", "init -m owner/name", {"--data": "rows.jsonl"}, {"--example": "orders"},
        start="rows"),
    of_run("init.py:_chosen: name one", "init -d rows.jsonl", {"--model": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        start="rows"),
    of_run("named.py:_run_of", "runs show r.yaml", command("train r.yaml"), start="model", dear=True),
)  # fmt: skip
RESULTS = (
    of_run("compare.py:compare", "compare a a --level 2", {"--level": "0.95"}, start="scored"),
    of_run("compare.py:results_of", "compare runs/r b", command(SCORE.format("u", "d"), "compare d b"),
        start="scored", reading={"FILE": "u.jsonl", "DIR": "d", "OTHER": "b"}, instead=True),
    Case("evals/compare.py:compare", {}, (command(SCORE.format("u", "a")),), "compare a b", "scored",
        reading={"MODEL": "runs/r", "FILE": "u.jsonl", "DIR": "a"}),
    Case("evals/compare.py:read_task_results", {}, (command(SCORE.format("u", "empty")),), "compare empty b", "scored",
        change=empty, reading={"MODEL": "runs/r", "FILE": "u.jsonl", "DIR": "empty"}),
    Case("evals/figures.py:read_results", {}, (command("compare a a"),), "compare a tasks", "scored",
        change=empty, reading={"what tuner eval --output wrote": "tuner compare a a"}, instead=True),
)  # fmt: skip
DATA = (
    of_run("data.py:show", "data show entry", command("data verify entry"), start="prepared", change=damaged,
        instead=True, ends=6),
    of_run("data.py:verify", "data verify", command("data gc --verify"), start="prepared", change=damaged,
        reading={" removes damaged directories": ""}),
    Case("rundir/last_checkpoint.py:way_to_whole: make", {}, (command("resume runs/r"),), "runs verify runs/r", "kept",
        change=half_gone, dear=True),
    Case("rundir/last_checkpoint.py:way_to_whole: none", {}, (command("mv runs/r/checkpoints "
        "runs/r/damaged-checkpoints", "resume runs/r"),), "runs verify runs/r", "run", change=half_gone, dear=True),
    of_run("schedule_view.py:: prepare", "config show r.yaml --plot-schedule", command("prepare-data r.yaml"),
        {"train.duration": "9 steps"}, start="model", recipe={"train.duration": "1 epochs",
        "schedule.warmup": "2 steps"}, reading={"train.duration in steps": "train.duration: 9 steps"}),
)  # fmt: skip
EVALUATIONS = (
    of_run("eval.py:eval", "eval runs/r --output d", {"--tasks": "t.jsonl"}, start="scored",
        reading={"FILE.jsonl": "t.jsonl"}),
    of_run("eval.py:_check_flags", "eval runs/r --tasks t.jsonl --parallel.processes 2", {"--parallel.processes": None},
        start="scored", reading={"leave it out, or start several: torchrun --nproc-per-node 2 -m tuner eval ...":
        "leave out --parallel.processes"}),
    Case("run/score.py:find_trained", {}, (command(f"eval runs/r {ROWS}"), command("export-hf runs/r --adapter merge",
        f"eval {EXPORT} r.yaml {ROWS}")), f"eval {ADAPTER} r.yaml {ROWS}", "adapter", instead=True, dear=True,
        reading={"the run itself": f"tuner eval runs/r {ROWS}", "what tuner export-hf RUN --adapter merge writes":
        f"tuner export-hf runs/r --adapter merge && tuner eval {EXPORT} r.yaml {ROWS}"}),
    Case("run/score.py:run_recipe", {"data.eval": "rows.jsonl"}, (command(f"eval {EXPORT} r.yaml"),), f"eval {EXPORT}",
        "exported", instead=True, reading={"MODEL": EXPORT}),
    Case("run/score.py:_require_same_rows", {"data.eval": "other.jsonl"}, (command("eval runs/r r.yaml"),),
        "eval runs/r", "kept", change=another_row, instead=True, reading={"RUN RECIPE": "runs/r r.yaml"}, dear=True),
    Case("run/score.py:_measured", {"method.kind": "kto", "data.train": "labels.jsonl", "data.eval": "labels.jsonl",
        **LORA}, (command("eval runs/r"),), f"train r.yaml && export-hf runs/r && eval {EXPORT} r.yaml", "model",
        change=labels, instead=True, onward=True, dear=True),
    Case("run/score.py:_require_head: give a recipe", PAIRS, ({"method.kind": "reward"},),
        "train r.yaml --method.kind reward && eval runs/r r.yaml", "model", change=pairs, dear=True),
    Case("run/score.py:_require_head: give a run", REWARD, (command("train r.yaml --name other",
        "eval runs/other r.yaml"),), "eval runs/r r.yaml", "run", change=pairs, instead=True, dear=True,
        reading={"a run of method.kind: reward, or its export":
        "tuner train r.yaml --name other && tuner eval runs/other r.yaml"}),
    Case("run/score_tasks.py:with_tasks", {}, ({"eval.tasks": ["t.jsonl"], **command(
        "eval runs/r r.yaml --tasks recipe")},), "eval runs/r r.yaml --tasks recipe --tasks t.jsonl", "scored",
        instead=True, reading={"write the others into the recipe":
        "write eval.tasks: [t.jsonl], then tuner eval runs/r r.yaml --tasks recipe"}),
    Case("run/score_tasks.py:score_tasks", {}, (command("eval runs/r --tasks t.jsonl"),), "eval runs/r --tasks recipe",
        "scored", instead=True, reading={"MODEL --tasks FILE.jsonl": "runs/r --tasks t.jsonl"}, dear=True),
)  # fmt: skip
ANSWERS = (
    of_run("generate.py:_prompts", GENERATE, {"--prompt": "TEXT"}, {"--file": "prompts.txt"}, change=hidden,
        reading={"FILE": "prompts.txt", ", or talk: tuner chat MODEL": ""}),
    of_run("generate.py:_prompts", GENERATE, command("chat runs/r --max-new-tokens 2 < talk"), change=hidden,
        instead=True, reading={"give --prompt TEXT or --file FILE, or": "", "MODEL":
        "runs/r --max-new-tokens 2 < talk"}),
    of_run("talk.py:Talk.__post_init__", "chat alone", command("generate alone --prompt TEXT --raw"), start="exported",
        change=alone, instead=True, reading={"MODEL": "alone"}),
    Case("generate.py:Sampling.check", {}, ({"--temperature": "0.7"},), f"{GENERATE} --prompt a --top-p 0.5", "run"),
    Case("generate.py:_with_adapter", {}, ({"--base": "moved"},), f"generate {ADAPTER} --prompt a --max-new-tokens 2",
        "adapter", change=moved, reading={"MODEL": "moved"}),
    Case("generate.py:_require_text", REWARD, (command("eval runs/r r.yaml"),),
        f"train r.yaml && {GENERATE} --prompt a", "model", change=pairs, instead=True, onward=True, dear=True),
    Case("generate.py:base_of", {}, ({"--base": EXPORT},), "generate alone --compare base --prompt a", "exported",
        change=alone, reading={"MODEL": EXPORT}, dear=True),
)  # fmt: skip
COMMANDS = (
    of_run("help.py:: stopped", "help exit-codes", command("resume runs/r"), start="stopped", instead=True,
        reading={"RUN continues": "runs/r"}, dear=True),
    of_run("help.py:: a bug", "help exit-codes", command("config check r.yaml --debug"), start="model", instead=True,
        reading={"run the command again with --debug": "tuner config check r.yaml --debug"}),
    of_run("shells.py:shell_of", "--show-completion --shell tcsh", {"--shell": "bash"}, start="rows",
        reading={" or zsh or fish": ""}),
    of_run("shells.py:install", "--install-completion --shell bash", {"--show-completion": True,
        "--install-completion": None}, start="rows", change=shut, reading={"tuner --show-completion prints the script":
        "add --show-completion and leave out --install-completion"}),
    of_run("profile.py:ProfileOptions.check: leave out --output", "profile r.yaml --fit 24GiB --output p",
        {"--output": None}, start="model", dear=True,
        reading={", and write the page with the flags that --fit prints": ""}),
    of_run("profile.py:ProfileOptions.check: leave out --device", "profile r.yaml --measure 1 --device cpu",
        {"--device": None}, {"--measure": None}, start="model", dear=True,
        reading={"--processes, --host-memory and --fit, or": "or leave out"}),
    of_run("profile.py:ProfileOptions.check: --fit says", "profile r.yaml --fit 24GiB --memory 1GiB",
        {"--memory": None}, start="model", dear=True, reading={"--fit says how much memory there is":
        "leave out --memory"}),
    of_run("ladder.py:_ladder_recipe", "ladder plan r.yaml", {"ladder": {"sizes": ["1M", "2M"]}}, start="model",
        recipe=LADDER, dear=True, reading={", or train it alone: tuner train RECIPE": "", "60M, 190M": "1M, 2M"}),
    of_run("ladder.py:_ladder_recipe", "ladder plan r.yaml", command("train r.yaml"), start="model", instead=True,
        dear=True, reading={"write ladder: {sizes: [60M, 190M]}, or": ""}),
    of_run("ladder_fit.py:_asked: add its size", "ladder fit points.csv --tokens 9B", {"--target": "1B",
        "--tokens": "9B"}, start="rows", dear=True, change=points),
    of_run("ladder_fit.py:_asked: write", "ladder fit points.csv --target small", {"--target": "1B", "--tokens": "20B"},
        start="rows", dear=True, change=points, reading={", or one of the rungs:": ","}),
    of_run("ladder_fit.py:_asked: write", "ladder fit points.csv --target 2B", {"--target": "2B", "--tokens": "20B"},
        start="rows", dear=True, change=points, reading={", or one of the rungs:": ","}),
    of_run("ladder_fit.py:_count", "ladder fit points.csv --target 1B --tokens many", {"--tokens": "20B"},
        {"--tokens": "1.5e9"}, start="rows", dear=True, change=points),
)  # fmt: skip
CASES = (*RECIPES, *RESULTS, *DATA, *EVALUATIONS, *ANSWERS, *COMMANDS)
