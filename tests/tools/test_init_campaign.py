"""What `tuner init` proposes for rows of many kinds is what is written down as right; its campaign runs the commands.
"""

import random
from pathlib import Path

import pytest

from tools.init.cases import Case, Right, cases
from tools.init_campaign import write_models, wrong_losses, wrong_values
from tuner.config.load import load_recipe
from tuner.config.starter import Room, starter
from tuner.data.look import look

SMALL = [case for case in cases() if not case.is_large]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


SLOW = ("200 turns", "one of 20,000 holds half a percent", "one of 20,000 holds two percent", "sorted by length",
        "one of 20,000 holds two percent, beyond the positions", "ten in a thousand hold a quarter of the tokens",
        "plain text of 20,000 tokens")  # fmt: skip


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("number", range(len(SMALL)), ids=[case.name for case in SMALL])
def test_the_right_recipe_is_proposed(number: int, models: Path, tmp_path: Path) -> None:
    case = SMALL[number]
    for name, content in case.files(random.Random(number)).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    model = "owner/away" if case.model == "away" else str(models / case.model)
    tree = {"model": {"name_or_path": model}, "data": {"train": str(tmp_path / case.source)}}
    given = load_recipe(tree).recipe
    text = starter(model, case.source, look(model, given.data.train[0]), Room("this machine", 1 << 40))
    assert wrong_values(case, text) == []


def test_what_is_wrong_is_found() -> None:
    case = Case("chats", lambda rng: {}, Right("sft", 512, bad=2, longer=1))
    text = "method: {kind: dpo}\ndata:\n  train: rows.jsonl\n  max_length: 256\n"
    wrong = [line.partition(":")[0] for line in wrong_values(case, text)]
    assert wrong == ["method.kind", "data.max_length", "bad rows"]
    counts = {"dropped_rows": {"long": 2}, "skipped": {}, "dropped": {}, "truncated": 0}
    said = wrong_losses(case, text, {"train": {**counts, "tokens": 100, "packed_tokens": 90}, "eval": None})
    assert [line.split()[0] for line in said] == ["2", "0", "10.0%"]
