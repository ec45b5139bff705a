"""A run whose rows are short at first: stopped and resumed, and refused where no row is longer."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.errors import RecipeError


def test_a_run_has_the_lengths_of_its_steps_wherever_it_was_stopped(workplace: Path) -> None:
    texts = [{"text": f"{n} " + "ab" * (n % 30 + 5)} for n in range(120)]
    (workplace / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    grown = {
        "data__train": str(workplace / "texts.jsonl"), "data__packing": "true", "method__kind": "pretrain",
        "train__length_warmup__steps": "4", "train__length_warmup__start": "8",
        "train__length_warmup__multiple_of": "8", "train__duration": "6 steps", "checkpoint__every": "never",
    }  # fmt: skip
    whole = launch(workplace, **grown)
    tokens = np.diff([0, *(line["tokens"] for line in lines(whole.run_dir))]).tolist()
    assert tokens[:4] == [8 * length for length in (8, 16, 32, 48)]
    assert min(tokens[4:]) > 8 * 56
    other = grown | {"name": "parts"}
    assert launch(workplace, train__stop_after="2 steps", **other).step == 2
    resumed = launch(workplace, "must", **other)
    assert trainings.outcome(resumed.run_dir) == trainings.outcome(whole.run_dir)
    longer = other | {"train__length_warmup__start": "64", "name": "longer"}
    with pytest.raises(RecipeError, match="64 tokens are no fewer than a whole row's 64"):
        launch(workplace, **longer)
