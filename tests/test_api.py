"""The Python API: the commands' own functions, from a mapping to a verified export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tuner
from tuner.config.shipped import recipes_dir


def recipe(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(recipes_dir() / "models" / "tiny-llama"), "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": "pretrain"},
        "data": {"train": str(recipes_dir() / "data" / "notes.jsonl"), "max_length": 128},
        "train": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
    }


def test_from_a_mapping_to_an_export(tmp_path: Path) -> None:
    wish = recipe(tmp_path)
    prepared = tuner.prepare_data(wish)
    assert not prepared.cached
    assert tuner.prepare_data(wish).cached
    result = tuner.train(wish, prepared=prepared.path)
    assert (result.status, result.step, result.run_dir) == ("finished", 2, tmp_path / "run")
    report = tuner.export_hf(result.run_dir)
    assert (report.path / "model.safetensors").is_file()
    again = tuner.train(tuner.load_recipe(wish))
    assert (again.status, again.step) == ("finished", 2)


def test_importing_the_package_is_cheap_and_train_is_a_function_and_a_package() -> None:
    code = (
        "import sys, tuner\n"
        "assert not {'pydantic', 'torch', 'typer'} & set(sys.modules)\n"
        "import tuner.train.plan\n"
        "assert callable(tuner.train) and tuner.train.plan.__name__ == 'tuner.train.plan'\n"
        "from tuner import train\n"
        "assert callable(train)\n"
        "try:\n    train({})\nexcept tuner.errors.RecipeError:\n    pass\n"
        "try:\n    tuner.nothing\nexcept AttributeError:\n    pass\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
