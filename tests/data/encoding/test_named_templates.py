"""The chat templates that ship with the program: masks, prompts, and the tokens that they bring along."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.recipe import AddedToken, TokenizerSection
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import APART, EncodedBatch
from tuner.data.encoding.template import ChatTemplate, named_templates
from tuner.data.encoding.template_layout import Shape, TemplateLayouts
from tuner.data.encoding.tokenizer import TextTokenizer, declared_special_tokens, with_control_tokens, with_tokens
from tuner.data.encoding.tokenizer_files import DIRECTORY, NamedTemplate, load_tokenizer, named_template
from tuner.data.encoding.turns import Planner
from tuner.data.reading.records import parse_record
from tuner.errors import DataError

PLAIN = tiny.chat("hello world?", "the answer is forty two", "And\n\nnow", "\u00e9 two ")["messages"]
WITH_SYSTEM = [{"role": "system", "content": "You are helpful"}, *PLAIN]
ASSETS = os.environ.get("TUNER_TEST_ASSETS")
OWN = {
    "llama3": "llama3", "qwen3": "qwen3", "gemma": "gemma3", "deepseek": "deepseek_v3", "command-r": "command_r_plus",
    "mistral-nemo": "mistral_nemo",
}  # fmt: skip
"""Our templates, and the assets that have theirs: the first two for every test, the others with `make campaign`."""
UNMARKED = ("gemma4", "llama3", "qwen3", "qwen3.5")
"""Those of models that think have no marks, so that each answer keeps its thought."""
BY_ROW = ("gemma4", "qwen3.5")
"""Gemma 4's macros hide what they do with contents; of Qwen3.5's conversations each answer is a document."""


def named_as(name: str) -> NamedTemplate:
    found = named_template(name)
    assert found is not None
    return found


def files_of(base: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in base.iterdir()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's tokenizer without a template: `<|im_end|>` in its vocabulary is an ordinary token."""
    made = {name: content for name, content in tiny.files().items() if name != "chat_template.jinja"}
    spec = json.loads(made["tokenizer.json"])
    for token in spec["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    made["tokenizer.json"] = json.dumps(spec).encode()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    made["tokenizer_config.json"] = json.dumps(config).encode()
    directory = tmp_path_factory.mktemp("base")
    for name, content in made.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def loaded(base: Path) -> dict[str, TextTokenizer]:
    """The tokenizer with each of the templates, as it is loaded but for what transformers is asked."""
    made = {}
    for name in CHAT_TEMPLATES:
        named = named_as(name)
        files, added = with_control_tokens(files_of(base), (), named.tokens)
        files, new_ids = with_tokens(files, added) if added else (files, range(0))
        made[name] = TextTokenizer(files, named.source, new_ids=new_ids)
    return made


def test_every_name_has_a_file_and_every_file_a_name() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.jinja")} == set(CHAT_TEMPLATES) == set(map(str, CHAT_TEMPLATES))
    assert named_template("./chatml") is named_template(None) is None


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_exactly_the_answers_are_trained_each_after_its_prompt(name: str, loaded: dict[str, TextTokenizer]) -> None:
    tokenizer = loaded[name]
    encoder = Encoder(tokenizer, "assistant")
    for messages in (PLAIN, WITH_SYSTEM):
        batch = encoder.encode([parse_record({"messages": messages})])
        assert not batch.problems and set(batch.notes) <= {APART}
        if not batch.by_answer:
            assert batch.input_ids.tolist() == tokenizer.encode(tokenizer.render(messages))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i, (prompt, answer) in zip(answers, spans(batch), strict=True):
            assert prompt == tokenizer.encode(tokenizer.render(messages[:i], True))
            assert messages[i]["content"].strip() in tokenizer.decode(answer)
            assert answer[-1] in tokenizer.eos_ids


def test_chatml_writes_tools_as_qwen_does(loaded: dict[str, TextTokenizer]) -> None:
    tools, called = cases(__file__, "chatml_writes_tools")
    system = [{"role": "system", "content": "Be brief."}]
    for last in range(1, len(called) + 1):
        texts = [loaded[name].render(system + called[:last], last % 2 == 1, tools) for name in ("chatml", "qwen")]
        assert texts[0] == texts[1]
    alone = loaded["chatml"].render(called, False, tools)
    assert alone.startswith("<|im_start|>system\n# Tools\n") and "Qwen" not in alone
    row = parse_record({"messages": system + called, "tools": tools})
    batch = Encoder(loaded["chatml"], "assistant").encode([row])
    trained = [loaded["chatml"].decode(answer) for _, answer in spans(batch)]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call>'
    texts = [written, f"I ask again.\n{written}\n{written}", "It is three."]
    assert not batch.problems and trained == [f"{text}<|im_end|>" for text in texts]


def spans(batch: EncodedBatch) -> Iterator[tuple[list[int], list[int]]]:
    """Every trained stretch of ids, and the ids of its document before it."""
    for first, after in pairwise(batch.offsets.tolist()):
        ids, flags = batch.input_ids[first:after].tolist(), batch.trained[first:after].tolist()
        edges = [i for i in range(1, len(ids) + 1) if i == len(ids) or flags[i] != flags[i - 1]]
        yield from ((ids[:a], ids[a:b]) for a, b in zip([0, *edges], edges, strict=False) if flags[a])


@pytest.mark.parametrize("name", [name for name in CHAT_TEMPLATES if name not in UNMARKED])
def test_its_marks_are_those_that_transformers_reads(
    name: str, loaded: dict[str, TextTokenizer], tmp_path: Path
) -> None:
    """Here a token reaches over the headers of Llama 3."""
    from transformers import PreTrainedTokenizerFast

    from tuner.export.write import turn_ends

    ours = loaded[name]
    ours.save(tmp_path)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(WITH_SYSTEM, return_dict=True, return_assistant_tokens_mask=True)
    assert set(ours.eos_ids) == {theirs.eos_token_id, *turn_ends(theirs)}  # what an export stops at
    batch = Encoder(ours, "assistant").encode([parse_record({"messages": WITH_SYSTEM})])
    assert batch.input_ids.tolist() == expected["input_ids"]
    assert batch.trained.tolist() == [bool(flag) for flag in expected["assistant_masks"]]


@pytest.mark.parametrize("name", [name for name in CHAT_TEMPLATES if named_as(name).tokens and name not in BY_ROW])
def test_rows_need_no_render_of_their_own(name: str, loaded: dict[str, TextTokenizer]) -> None:
    """Where control tokens surround the turns, the text around contents is learned once."""
    layouts = TemplateLayouts(loaded[name], Planner(loaded[name], "assistant", "refuse"))
    for roles in (("user", "assistant"), ("user", "assistant", "user", "assistant")):
        assert layouts.find(Shape(roles, (None,) * len(roles))) is not None


def test_tokens_that_are_lacking_are_added_and_end_turns(loaded: dict[str, TextTokenizer], base: Path) -> None:
    before = TextTokenizer(files_of(base))
    assert before.eos_ids == (before.eos_id,)
    chatml, llama3 = loaded["chatml"], loaded["llama3"]
    assert (chatml.new_ids, chatml.vocab_size) == (range(0), before.vocab_size)
    end = chatml.encode("<|im_end|>")
    assert end == before.encode("<|im_end|>") and set(end) <= chatml.special_ids and end[0] in chatml.eos_ids
    assert llama3.new_ids == range(before.vocab_size, before.vocab_size + 3)
    assert llama3.decode([llama3.eos_ids[-1]]) == "<|eot_id|>"
    assert loaded["vicuna"].hash == before.hash  # nothing is added where nothing is lacking


def test_tokens_of_the_recipe_come_first_and_are_not_added_twice(base: Path) -> None:
    wanted = [AddedToken(token="word"), AddedToken(token="<|im_sep|>", special=True)]
    for known in (wanted, wanted[:1]):
        assert with_control_tokens(files_of(base), known, named_as("phi4").tokens)[1] == wanted


def test_a_template_that_ends_with_eos_needs_one() -> None:
    alpaca = named_as("alpaca")
    without = tiny.tokenizer(alpaca.source, eos_token=None)
    with pytest.raises(DataError, match="alpaca ends answers with the tokenizer's eos_token") as caught:
        alpaca.require_end(without.special_tokens, "somewhere")
    assert "chat_template: chatml" in str(caught.value.hint)
    named_as("chatml").require_end(without.special_tokens, "somewhere")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    section = TokenizerSection(chat_template=str(tmp_path / "mine.jinja"))
    with pytest.raises(DataError, match=r"mine\.jinja: No such file") as caught:
        load_tokenizer(str(tmp_path), None, section, tmp_path)
    assert "chatml" in str(caught.value.hint)


@pytest.mark.skipif(ASSETS is None, reason="needs TUNER_TEST_ASSETS")
@pytest.mark.parametrize("name", OWN)
def test_plain_chats_are_those_of_the_published_template(name: str) -> None:
    """Nemo's writes a system message only before a last question, so that answers would be learned without it."""
    path = Path(str(ASSETS)) / OWN[name] / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip(f"needs the asset {OWN[name]}")
    config = json.loads(path.read_text(encoding="utf-8"))
    tokens = declared_special_tokens(config, {})
    sources = named_as(name).source, named_templates({}, config)["default"]
    ours, own = (ChatTemplate(source, tokens) for source in sources)
    for messages in (PLAIN, WITH_SYSTEM) if name != "mistral-nemo" else (PLAIN,):
        for stop in range(1, len(messages) + 1):
            assert ours.render(messages[:stop], True) == own.render(messages[:stop], True)
