"""What a case may start from: rows alone, a tiny model, data that is prepared, a run, its export."""

import json
import shutil

from tests.fixtures import trainings
from tools.advice.hint_cases import read
from tools.advice.hint_place import BASE, HERE, Place
from tools.advice.hint_words import with_lines
from tuner.errors import ExitCode

MERGES = {"model.name_or_path": "./model", "tokenizer.name_or_path": "./model"}
HOOK = """
import os

def hook(report):
    if os.path.exists("fail"):
        raise ValueError
"""


def rows(place: Place) -> None:
    """Rows of prompts and completions, and a model that is not on this machine."""
    lines = [{"prompt": f"{number} ", "completion": "ab" * (1 + number % 9)} for number in range(24)]
    (place.work / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def model(place: Place) -> None:
    """A tiny model."""
    trainings.prepare(place.work, 1)
    rows(place)


def prepared(place: Place) -> None:
    """Data that is prepared for the model."""
    model(place)
    place.write(with_lines({**BASE, **HERE}, {}))
    assert place.run("prepare-data r.yaml").code == 0


def teacher(place: Place) -> None:
    """An export of a teacher's run, next to the model."""
    from tuner.config.recipe import TokenizerSection
    from tuner.data.encoding.tokenizer_files import load_tokenizer

    model(place)
    shutil.copytree(place.work / "model", place.work / "t" / "step-1")
    load_tokenizer(str(place.work / "model"), None, TokenizerSection(name_or_path="byte")).save(place.work / "t/step-1")


def run(place: Place) -> None:
    """A finished run."""
    model(place)
    place.write(with_lines({**BASE, **HERE}, {}))
    assert place.run("train r.yaml").code == 0


def stopped(place: Place) -> None:
    """A run that was stopped after its first step."""
    model(place)
    place.write(with_lines({**BASE, **HERE}, {}))
    assert place.run("train r.yaml --train.stop_after '1 steps'").code == ExitCode.STOPPED


def reset(place: Place) -> None:
    """A run of three steps whose optimizer was reset after the second."""
    model(place)
    lines = {"train.duration": "3 steps", "checkpoint.every": "1 steps", "checkpoint.keep": 3}
    place.write(with_lines({**BASE, **HERE, **lines}, {}))
    assert place.run("train r.yaml --train.stop_after '2 steps'").code == ExitCode.STOPPED
    assert place.run("train r.yaml --resume must --reset optimizer").code == 0


def taught(place: Place) -> None:
    """A run of a student that was stopped after its first step."""
    teacher(place)
    place.write(with_lines({**BASE, **HERE, "method.kind": "distill", "method.teacher": "./t/step-1"}, {}))
    assert place.run("train r.yaml --train.stop_after '1 steps'").code == ExitCode.STOPPED


def laddered(place: Place) -> None:
    """A ladder of two sizes."""
    model(place)
    place.write(with_lines({**BASE, **HERE, **read("ladder")["recipe"]}, {}))
    assert place.run("ladder run r.yaml").code == 0


def begun(place: Place) -> None:
    """A run that failed before its first checkpoint."""
    model(place)
    (place.work / "hook.py").write_text(HOOK)
    (place.work / "fail").touch()
    place.write(with_lines({**BASE, **HERE, "hooks": ["hook.py:hook"]}, {}))
    assert place.run("train r.yaml").code == ExitCode.USAGE
    (place.work / "fail").unlink()


def unsaved(place: Place) -> None:
    """A finished run without a checkpoint."""
    model(place)
    place.write(with_lines({**BASE, **HERE}, {}))
    assert place.run("train r.yaml --checkpoint.at_end false").code == 0


def kept(place: Place) -> None:
    """A finished run that was evaluated and saved after each of three steps, and keeps the best and the last one."""
    model(place)
    recipe = {**BASE, **HERE, "train.duration": "3 steps", "data.eval": "rows.jsonl", "ema.decay": 0.9}
    recipe |= {"optimizer.lr": 1, "schedule.kind": "constant"}  # it gets worse
    place.write(with_lines(recipe, {}))
    often = "--checkpoint.every '1 steps' --checkpoint.keep 2 --checkpoint.keep_best eval/loss --eval.every '1 steps'"
    assert place.run(f"train r.yaml {often}").code == 0


def exported(place: Place) -> None:
    """A finished run and its export."""
    run(place)
    assert place.run("export-hf runs/r").code == 0


def adapter(place: Place) -> None:
    """A run that trained an adapter, and its export without the model."""
    model(place)
    place.write(with_lines({**BASE, **HERE, "adapter.kind": "lora", "adapter.r": 4}, {}))
    assert place.run("train r.yaml && export-hf runs/r --adapter keep").code == 0


def merged(place: Place) -> None:
    """A tiny model whose tokenizer has merges, as llama.cpp wants it, and an adapter of it: a run and a directory."""
    from tests.export.gguf_models import write_model

    rows(place)
    write_model(place.work / "model", "llama")
    place.write(with_lines({**BASE, **MERGES, "adapter.kind": "lora", "adapter.r": 4}, {}))
    assert place.run("train r.yaml && export-hf runs/r --adapter keep").code == 0


def scored(place: Place) -> None:
    """A finished run, two tasks, and the results of one each in `a` and `b`."""
    run(place)
    for name, items, results in (("t", 3, "a"), ("u", 4, "b")):
        lines = [{"prompt": f"{number}", "choices": ["a", "b"], "answer": number % 2} for number in range(items)]
        (place.work / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert place.run(f"eval runs/r --tasks {name}.jsonl --output {results}").code == 0


ALL = (
    rows, model, prepared, teacher, run, stopped, reset, taught, laddered, begun, unsaved, kept, exported, adapter,
    merged, scored,
)  # fmt: skip
STARTS = {start.__name__: start for start in ALL}
