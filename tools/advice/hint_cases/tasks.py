"""What is said of tasks and their items, of the tasks of a run, and of directories that are runs or models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_cases.cli import EXPORT, alone, command
from tools.advice.hint_cases.export import TIED
from tools.advice.hint_cases.runs import TRAIN, after
from tools.advice.hint_cases.setup import DRY
from tools.advice.hint_place import Case, Change
from tools.advice.hint_starts import HOOK

FORMS = {"choice": {"prompt": "a", "choices": ["a", "b"], "answer": 0}, "text": {"text": "ab"},
    "question": {"prompt": "a", "answer": "b"}}
OF_FORMS = {'{"prompt", "choices", "answer"}, {"text"} or {"prompt", "answer"}':
    "mv choice.jsonl x.jsonl; mv text.jsonl x.jsonl; mv question.jsonl x.jsonl", "write one a line: ": ""}
ADAPTER = f"{EXPORT}-adapter"
OWN = "eval runs/r r.yaml --tasks recipe"
SCORED: dict[str, Any] = {"start": "scored", "words": OWN}
LONG = {"prompt": "a", "choices": ["ab" * 20, "ba" * 20], "answer": 0}


def items(*lines: object) -> Change:
    """A file of items that are not right, and one for each form."""

    def change(place: Path) -> None:
        (place / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, record in FORMS.items():
            (place / f"{name}.jsonl").write_text(json.dumps(record) + "\n")

    return change


def of_items(site: str, *lines: object, **more: Any) -> Case:
    """What is said of a file of items, which is then another one."""
    moved = [command(f"mv {name}.jsonl x.jsonl") for name in FORMS]
    recipe = {"eval.tasks": [{"task": "x.jsonl", "max_new_tokens": 2}]}
    return Case(
        f"evals/items.py:{site}", recipe, tuple(moved), change=items(*lines), reading=OF_FORMS, **SCORED, **more
    )


def untalked(place: Path) -> None:
    """An export without a chat template, and items."""
    alone(place)
    items(FORMS["choice"])(place)


def hooked(place: Path) -> None:
    """Code of the user's that fails."""
    (place / "own.py").write_text(HOOK)
    (place / "fail").touch()


def taken(place: Path) -> None:
    """A file where a tracker writes."""
    (place / "runs/r/tensorboard").write_text("")


def without_record(place: Path) -> None:
    """The record of the run is gone."""
    (place / "runs/r/run.json").unlink()


def own_tokenizer(place: Path) -> None:
    """A tokenizer that only code of its own reads."""
    (place / "model/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')


ITEMS = (
    of_items("items_of: write one", dear=True),
    of_items("item_of: write one", [1], dear=True),
    of_items("item_of: write \N{SECTION SIGN}", {"question": "a"}),
    Case("evals/items.py:items_of: write items", {}, (command("mv text.jsonl x.jsonl"),), "eval runs/r --tasks x.jsonl",
        "scored", change=items(FORMS["text"], FORMS["choice"]), reading={
        "write items of another kind to a file of their own": "mv text.jsonl x.jsonl"}),
    Case("evals/items.py:_too_many", {"eval.tasks": "x.jsonl"}, ({"eval.tasks": [{"task": "x.jsonl", "max_items": 2}
        ]},), change=items(*[FORMS["text"]] * ((1 << 18) + 1)), reading={"set max_items, or divide the file":
        "set eval.tasks: [{task: x.jsonl, max_items: 2}]"}, dear=True, **SCORED),
)  # fmt: skip
TASKS = (
    Case("evals/load.py:require_figure", {"eval.tasks": "t.jsonl", "checkpoint.keep_best": "eval/t/f1"},
        ({"checkpoint.keep_best": "eval/t/acc"}, {"checkpoint.keep_best": "eval/t/acc_norm"},
        {"checkpoint.keep_best": "eval/t/bits_per_byte"}), f"{TRAIN} --name other",
        "scored", dear=True),
    Case("evals/load.py:_loaded", {"eval.tasks": [{"task": "x.jsonl", "chat": True}], "tokenizer.name_or_path": None},
        ({"eval.tasks": [{"task": "x.jsonl", "chat": False}]}, {"tokenizer.chat_template": "chatml"}),
        "eval alone r.yaml --tasks recipe", "exported", reading={"chat: false":
        "eval.tasks: [{task: x.jsonl, chat: false}]"}, change=untalked, dear=True),
    Case("evals/requests.py:Asker._request: raise", {"eval.tasks": "x.jsonl", "data.max_length": 32}, ({"eval.tasks":
        [{"task": "x.jsonl", "max_length": 64}]},), change=items(LONG), reading={
        "raise the task's max_length, such as {task: ..., max_length: 4096}":
        "write eval.tasks: [{task: x.jsonl, max_length: 64}]"}, **SCORED, dear=True),
)  # fmt: skip
OF_RUNS = (
    after("run/tasks/export.py:ExportTask.__init__", {**TIED, "export.at_end": True}, {"export.adapter": "keep"},
        start="model", dear=True),
    after("run/tasks/hooks.py:UserHook.__call__", {"hooks": ["own.py:hook"]}, command("rm -r fail", "resume runs/r"),
        start="model", change=hooked, reading={"fix it, then": "rm -r fail &&"}, instead=True, onward=True, dear=True),
    after("run/tasks/trackers/choose.py:TrackerHook.__call__", {}, {"--logging.trackers": "[]"},
        words="resume runs/r --logging.trackers '[tensorboard]'", start="stopped", change=taken,
        reading={"'[]'": "[]"}, dear=True),
    after("runtime/plugins.py:load", {}, {"--tasks": "quiz.py:items"}, start="scored",
        words="eval runs/r --tasks quiz.py", reading={"write quiz.py:NAME": "give --tasks quiz.py:items"},
        change=lambda place: (place / "quiz.py").write_text(f"def items(): return [{FORMS['choice']}]")),
)  # fmt: skip
DIRECTORIES = (
    after("rundir/run_json.py:_written_again", {}, command("rm runs/r/run.json", "resume runs/r"),
        words="runs show runs/r", change=lambda place: (place / "runs/r/run.json").write_text("{")),
    after("rundir/origin.py:warn_of_changed_file", {"checkpoint.keep": 3}, command("train r.yaml --resume must"),
        command("train r.yaml --name other"), start="stopped", words="resume runs/r --logging.level warning",
        instead=True, reading={" (it names the --reset needed)": "", " for another run": "",
        "--name NEW-NAME": "tuner train r.yaml --name other"}, dear=True),
    after("rundir/base_model.py:require_base_model", {"model.name_or_path": f"./{ADAPTER}", "name": "other"},
        {**command("export-hf runs/r"), "model.name_or_path": EXPORT}, start="adapter", words=DRY,
        reading={"that directory": EXPORT}, dear=True),
    after("rundir/base_model.py:_is_a_run: take", {"model.name_or_path": "./runs/r", "name": "other"},
        {"model.name_or_path": EXPORT}, start="exported", words=DRY),
    after("rundir/model_path.py:_best_step", {"data.eval": "rows.jsonl", "name": "other"}, {"checkpoint.keep_best":
        "eval/loss"}, dear=True,
        words="train r.yaml && export-hf runs/other --step best --dry-run"),
    after("rundir/page.py:write_page", {}, {"--output": "page.html"}, words="runs plot runs/r --output rows.jsonl",
        reading={"--output": "--output page.html"}),
    after("rundir/record.py:Run.problems", {}, command("resume runs/r"), words="runs show runs/r",
        change=without_record, reading={" writes it again": ""}),
    after("rundir/record.py:read_run: give a", {}, command("runs list runs"), words="runs show rows.jsonl",
        instead=True, reading={"tuner runs list shows": "tuner runs list runs"}),
    after("transformers_tokenizer.py:_require_readable", {"tokenizer.name_or_path": None},
        {"tokenizer.name_or_path": "runs/r/tokenizer"}, change=own_tokenizer, words="prepare-data r.yaml",
        reading={"to a directory with the tokenizer.json of that tokenizer": "", "set tokenizer.name_or_path":
        "set tokenizer.name_or_path: runs/r/tokenizer"}),
)  # fmt: skip
CASES = (*ITEMS, *TASKS, *OF_RUNS, *DIRECTORIES)
