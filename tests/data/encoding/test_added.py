"""Tokens added by a recipe: the ids that transformers gives them, in training and from the saved files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.recipe import TokenizerSection
from tuner.data.building.spec import keys_of
from tuner.data.encoding.fast import FastEncoder
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import RecipeError

WISH, TEXTS = cases(__file__, "wish"), cases(__file__, "texts")
CONFIGS: Any = cases(__file__, "configs")


def loaded(directory: Path, wish: list[Any], **section: Any) -> TextTokenizer:
    return load_tokenizer(str(directory), None, TokenizerSection.model_validate({"add_tokens": wish, **section}))


@pytest.mark.parametrize("config", CONFIGS)
def test_ids_are_those_of_transformers_from_the_saved_files(tmp_path: Path, config: str) -> None:
    from transformers import AutoTokenizer

    base = tiny.tokenizer(**CONFIGS[config])
    ours = loaded(tiny.write_directory(tmp_path / "base", **CONFIGS[config]), WISH)
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    first = base.vocab_size
    assert (ours.new_ids, ours.vocab_size, len(theirs)) == (range(first, first + 3), first + 3, first + 3)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert set(ids) & set(ours.new_ids) or text == TEXTS[2]
        assert ours.decode(ids) == text
    assert ours.encode(TEXTS[0])[-5:] != base.encode(TEXTS[0])[-5:] or first not in base.encode(TEXTS[0])
    assert (first + 1 in theirs.all_special_ids, first in theirs.all_special_ids) == (True, False)
    assert theirs.decode([first, first + 1], skip_special_tokens=True) == "hyperkalemia"
    assert theirs.eos_token_id == base.eos_id
    assert copy.copy(ours).new_ids == ours.new_ids  # as workers get it


def test_the_fast_encoder_knows_them(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    ours = loaded(tiny.write_directory(tmp_path), WISH)
    fast = FastEncoder(ours, ours.byte_table)
    for text in TEXTS:
        assert fast.encode(text).tolist() == ours.encode(text)


def test_one_that_closes_turns_is_an_end(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tuner.export.write import turn_ends

    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|turn|>' }}{% endfor %}"
    directory = tiny.write_directory(tmp_path / "base", template)
    ours = loaded(directory, WISH)
    assert ours.eos_ids[-1] == ours.new_ids[1]
    assert ours.find_special("so <|turn|> it is") == ("<|turn|>", 3)
    ours.save(tmp_path / "saved")
    assert turn_ends(AutoTokenizer.from_pretrained(tmp_path / "saved")) == [ours.new_ids[1]]  # so generation stops
    plain = loaded(directory, ["<|turn|>"])
    assert plain.new_ids[0] not in plain.eos_ids
    assert plain.find_special("so <|turn|> it is") is None


def test_they_decide_the_prepared_data(tmp_path: Path) -> None:
    directory = tiny.write_directory(tmp_path / "base")
    path = tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat("a", "b")])

    def key(*wish: Any) -> str:
        return keys_of(tiny.request(tmp_path / "cache", path, tokenizer=loaded(directory, list(wish)))).prepared

    names = [
        key(), key("x y"), key("x z"), key({"token": "x y", "special": True}), key("x y", "x z"), key("x z", "x y")
    ]
    assert len(set(names)) == len(names)
    assert key("x y") == key({"token": "x y", "special": False})


@pytest.mark.parametrize("token", ["<|im_end|>", "hello"])
def test_a_token_that_is_there_is_refused(tmp_path: Path, token: str) -> None:
    directory = tiny.write_directory(tmp_path)
    tiny_has = "hello" in json.loads(tiny.tokenizer_json())["model"]["vocab"]
    assert tiny_has
    with pytest.raises(RecipeError, match=r"is a token of the tokenizer already \(id \d+\)"):
        loaded(directory, ["new", token])


@pytest.mark.parametrize(("wish", "said"), cases(__file__, "wrong_lists_are_refused"))
def test_wrong_lists_are_refused(wish: Any, said: str) -> None:
    with pytest.raises(RecipeError) as failure:
        load_recipe({"model": {"name_or_path": "m"}, "data": {"train": "r.jsonl"}, "tokenizer": {"add_tokens": wish}})
    assert said in str(failure.value) + str(failure.value.hint)


def test_the_byte_tokenizer_takes_them_too(tmp_path: Path) -> None:
    ours = loaded(tmp_path, ["word"], name_or_path="byte")
    assert ours.new_ids == range(259, 260)
    assert ours.encode("a word") == [97, 32, 259]
