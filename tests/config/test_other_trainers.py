"""ArcticTraining's recipes, XTuner V1's configurations, OLMo-core's ladders and RecIS's arguments: what they become."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import lines
from tuner.config.imported import import_text
from tuner.config.load import Override, flatten, load_recipe, recipe_dict
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

FILES: list[dict[str, Any]] = cases(__file__, "a_file_becomes_what_it_says")
TRAINED = [file for file in FILES if file["tool"] in {"arctictraining", "xtuner"}]


def text_of(file: dict[str, Any]) -> str:
    """A file's text; of a tool whose files are JSON what they have in common, with its own keys."""
    common: Any = cases(__file__, "what_is_in_common")
    return file["given"] if isinstance(file["given"], str) else json.dumps(common[file["tool"]] | file["given"])


def asked_of(found: Any, wanted: Any) -> Any:
    """Of what was found only what is wanted to be in it."""
    if isinstance(wanted, dict):
        return {key: asked_of(found.get(key), value) for key, value in wanted.items()}
    nested = isinstance(wanted, list) and any(isinstance(item, dict) for item in wanted)
    return [asked_of(*pair) for pair in zip(found, wanted, strict=True)] if nested else found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file['tool']}, {file['name']}")
def test_a_file_becomes_what_it_says(file: dict[str, Any]) -> None:
    made = import_text(text_of(file), "file.yml")
    left = {"olmo-core": ["model.name_or_path"], "recis": ["data.train", "model.name_or_path"]}.get(file["tool"], [])
    assert made.tool == file["tool"] and sorted(item.partition(":")[0] for item in made.left) == left
    assert asked_of(flatten(recipe_dict(made.recipe)), file["values"]) == file["values"]


def two_steps(text: str, name: str, place: Path, **more: str) -> None:
    """Import a configuration and train two steps of it, in small."""
    trainings.prepare(place, 1, layers=1)
    (place / "texts.jsonl").write_text('{"text": "abababababab"}\n' * 40)
    (place / "made.yaml").write_text(import_text(text, name, directory=place).text)
    flags = {"tokenizer.name_or_path": "byte", "train.stop_after": "2 steps", "train.device": "cpu",
             "train.precision": "fp32", "eval.samples": "0", "train.compile": "false"} | more  # fmt: skip
    overrides = [Override(key, value) for key, value in flags.items()]
    loaded = load_recipe(place / "made.yaml", overrides, cwd=place)
    result = train(loaded, LaunchOptions(), RankInfo(), Console(main=False))
    steps = [line for line in lines(result.run_dir) if line["kind"] == "train"]
    assert len(steps) == 2 and all(line["loss"] > 0 for line in steps)


@pytest.mark.parametrize("file", TRAINED, ids=lambda file: f"{file['tool']}, {file['name']}")
def test_what_it_becomes_trains(file: dict[str, Any], tmp_path: Path) -> None:
    on_cuda = {"checkpoints": {"optimizer.offload": "none"}, "lora": {"profile.memory": "false"}}
    two_steps(text_of(file), "file.yml", tmp_path, **on_cuda.get(file["name"], {}))


@pytest.mark.parametrize("file", cases(__file__, "what_is_not_carried_over_is_said"), ids=lambda file: file["tool"])
def test_what_is_not_carried_over_is_said(file: dict[str, Any]) -> None:
    left = " ".join(import_text(text_of(file), "file.yml").left)
    assert all(part in left for part in file["left"]), left
