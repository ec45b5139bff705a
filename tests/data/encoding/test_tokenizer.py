"""Text to token ids: those of transformers; and tokens added by a recipe, in training and from the saved files."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.data import tiny
from tests.data.families import TEMPLATES
from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.recipe import TokenizerSection
from tuner.data.building.spec import keys_of
from tuner.data.encoding.fast import FastEncoder
from tuner.data.encoding.template import ChatTemplate
from tuner.data.encoding.tokenizer import TextTokenizer, byte_files
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import DataError, RecipeError

TEXTS, CHATS = cases(__file__, "texts"), cases(__file__, "chats")


@pytest.mark.parametrize("template", [tiny.CHATML, TEMPLATES["llama"], TEMPLATES["tools"]])
def test_ids_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(str(tiny.write_directory(tmp_path, template)), None, TokenizerSection())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for chat in CHATS:
        for generation in (False, True):
            for given_tools in (None, tools):
                options: dict[str, Any] = {"add_generation_prompt": generation, "tools": given_tools}
                text = ours.render(chat, generation, given_tools)
                assert text == theirs.apply_chat_template(chat, tokenize=False, **options)
                assert ours.encode(text) == theirs.apply_chat_template(chat, return_dict=False, **options)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", ["byte-level", "of another kind"])
@pytest.mark.parametrize("change", ["none", "hole", "beyond", "within", "within by a wrong id", "no added"])
def test_the_largest_id_is_the_librarys(kind: str, change: str) -> None:
    spec = json.loads(tiny.tokenizer_json())
    vocabulary, added = spec["model"]["vocab"], spec["added_tokens"]
    if kind != "byte-level":
        spec["normalizer"] = {"type": "Lowercase"}
    last = max(vocabulary, key=vocabulary.__getitem__)
    if change == "hole":
        vocabulary[last] += 50
    elif change == "beyond":
        added.append({**added[0], "content": "<new>", "id": vocabulary[last] + 1})
    elif change == "within":
        added.append({**added[0], "content": last, "id": vocabulary[last]})
    elif change == "within by a wrong id":
        added.append({**added[0], "content": last, "id": vocabulary[last] + 9})
    elif change == "no added":
        added.clear()
    tokenizer = TextTokenizer({**tiny.files(), "tokenizer.json": json.dumps(spec).encode()})
    backend = Tokenizer.from_str(json.dumps(spec))
    assert tokenizer.vocab_size == 1 + max(backend.get_vocab(with_added_tokens=True).values())


@pytest.mark.parametrize("single", ["$A", "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
@pytest.mark.parametrize("add", [True, False])
def test_tokens_around_a_text_equal_those_of_transformers(tmp_path: Path, single: str, add: bool) -> None:
    from transformers import AutoTokenizer

    tiny.write_directory(tmp_path, add_bos_token=add, add_eos_token=add)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    specials = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path), None, TokenizerSection())
    assert (
        ours.encode("hello", add_special_tokens=True) == AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"]
    )
    assert ours.encode("hello") == tiny.tokenizer().encode("hello")


def test_byte_tokenizer_loads_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer("nowhere/needed", None, TokenizerSection(name_or_path="byte"))
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.vocab_size, len(theirs)) == (259, 259)
    assert (ours.eos_id, ours.eos_ids) == (257, (257,))
    for text in TEXTS:
        assert ours.encode(text) == list(text.encode()) == theirs(text)["input_ids"]
        assert theirs.decode(ours.encode(text)) == text
    for chat in CHATS:
        assert ours.encode(ours.render(chat, True)) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
    again = load_tokenizer(str(tmp_path), None, TokenizerSection())
    assert (again.hash, again.template_hash) == (ours.hash, ours.template_hash)


BYTES = TextTokenizer(byte_files())


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    if BYTES.find_special(text) is None:
        assert BYTES.encode(text) == list(text.encode())
        assert BYTES.decode(BYTES.encode(text)) == text


def test_template_of_the_recipe_wins_and_is_saved(tmp_path: Path) -> None:
    directory = tiny.write_directory(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    section = TokenizerSection(chat_template=str(tmp_path / "mine.jinja"))
    tokenizer = load_tokenizer(str(directory), None, section)
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "a!"
    tokenizer.save(tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    plain = load_tokenizer(str(directory), None, TokenizerSection())
    assert (tokenizer.hash, tokenizer.template_hash == plain.template_hash) == (plain.hash, False)


def test_end_ids_join_tokenizer_model_and_template(tmp_path: Path) -> None:
    tiny.write_directory(tmp_path, eos_token="<|endoftext|>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert load_tokenizer(str(tmp_path), None, TokenizerSection()).eos_ids == (0, 7, 2)


@pytest.mark.parametrize("source", cases(__file__, "templates_that_escape_or_fail_are_data_errors"))
def test_templates_that_escape_or_fail_are_data_errors(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(DataError, match="chat template"):
        template.render([{"role": "user", "content": "a"}])


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        load_tokenizer(str(tmp_path / "none"), None, TokenizerSection())
    ways = ((None, "set tokenizer.name_or_path"), (str(tmp_path), "name a directory with a tokenizer.json"))
    for named, hint in ways:
        with pytest.raises(DataError, match="holds no tokenizer") as without:
            load_tokenizer("elsewhere" if named else str(tmp_path), None, TokenizerSection(name_or_path=named))
        assert (without.value.hint or "").startswith(hint)
    with pytest.raises(DataError, match="tokenizer.json"):
        TextTokenizer({"tokenizer.json": b"{}"}).encode("a")
    with pytest.raises(DataError, match="chat template line 2"):
        ChatTemplate("a\n{% if %}", {})
    no_template = {name: content for name, content in tiny.files().items() if name != "chat_template.jinja"}
    with pytest.raises(DataError, match="no chat template"):
        TextTokenizer(no_template).render([])


def test_data_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, tuner.data.building.spec, tuner.data.building.documents;"
        "import tuner.data.batches, tuner.cli.prepare_data;"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


WISH, WITH_ADDED = cases(__file__, "wish"), cases(__file__, "added_texts")
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
    for text in WITH_ADDED:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert set(ids) & set(ours.new_ids) or text == WITH_ADDED[2]
        assert ours.decode(ids) == text
    assert ours.encode(WITH_ADDED[0])[-5:] != base.encode(WITH_ADDED[0])[-5:] or first not in base.encode(WITH_ADDED[0])
    assert (first + 1 in theirs.all_special_ids, first in theirs.all_special_ids) == (True, False)
    assert theirs.decode([first, first + 1], skip_special_tokens=True) == "hyperkalemia"
    assert theirs.eos_token_id == base.eos_id
    assert copy.copy(ours).new_ids == ours.new_ids  # as workers get it


def test_the_fast_encoder_knows_them(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    ours = loaded(tiny.write_directory(tmp_path), WISH)
    fast = FastEncoder(ours, ours.byte_table)
    for text in WITH_ADDED:
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
