"""Which tokens are trained, by what text they stand for; and the templates that have names."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.recipe import AddedToken, TokenizerSection
from tuner.data.encoding import chat, place, turns
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import APART, Document, EncodedBatch
from tuner.data.encoding.template import ChatTemplate, named_templates
from tuner.data.encoding.template_layout import Shape, TemplateLayouts
from tuner.data.encoding.template_limits import MAX_STEPS
from tuner.data.encoding.tokenizer import (
    TextTokenizer,
    byte_files,
    declared_special_tokens,
    with_control_tokens,
    with_tokens,
)
from tuner.data.encoding.tokenizer_files import DIRECTORY, NamedTemplate, load_tokenizer, named_template
from tuner.data.encoding.turns import Planner, TrainOn
from tuner.data.reading.examples import Tokens
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import parse_record
from tuner.errors import DataError

TEMPLATES: dict[str, str] = {"chatml": tiny.CHATML, **cases(__file__, "templates")}  # type: ignore[dict-item]
LOOP_LAST, MARKED = TEMPLATES["loop_last"], TEMPLATES["marked"]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}


def encode(row: dict[str, Any], train_on: TrainOn = "assistant", tokenizer: TextTokenizer | None = None) -> Document:
    tokenizer, example = tokenizer or tiny.tokenizer(), parse_record(row)
    batch = Encoder(tokenizer, train_on).encode([example])
    if batch.problems:
        raise batch.problems[0]
    (alone,) = Encoder(tokenizer, train_on, fast=False).explain(example).documents
    document = Document(batch.input_ids.astype(np.int64), batch.trained, int(batch.prompt_tokens[0]), alone.spans)
    # The two ways, by bytes for many rows and by character spans for one, agree.
    assert document.input_ids.tolist() == alone.input_ids.tolist()
    assert document.trained.tolist() == alone.trained.tolist()
    assert document.prompt_tokens == alone.prompt_tokens
    return document


def trained_parts(document: Document | EncodedBatch, tokenizer: TextTokenizer | None = None) -> list[str]:
    tokenizer = tokenizer or tiny.tokenizer()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.trained.astype(int), [0]])))
    return [
        tokenizer.decode(document.input_ids[start:stop].tolist())
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_a_token_over_the_start_of_an_answer_matters_only_where_something_is_masked() -> None:
    template = "{% for m in messages %}{{ 'he' if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = tiny.tokenizer(template + "{% if add_generation_prompt %}he{% endif %}")
    apart = encode(tiny.chat("world", "llo"), "assistant", tokenizer)
    prompt, answer = tokenizer.encode("world<|im_end|>he"), tokenizer.encode("llo<|im_end|>")
    assert apart.input_ids.tolist() == prompt + answer
    assert apart.trained.tolist() == [False] * len(prompt) + [True] * len(answer)
    document = encode(tiny.chat("world", "llo"), "all", tokenizer)
    assert (document.trained.all(), document.prompt_tokens) == (True, 0)
    assert document.input_ids.tolist() == tokenizer.encode("world<|im_end|>hello<|im_end|>")


@pytest.mark.parametrize(("template", "contents", "train", "train_on", "parts"), cases(__file__, "what_is_trained"))
def test_what_is_trained(  # noqa: PLR0917
    template: str, contents: list[str], train: list[bool | None], train_on: TrainOn, parts: list[str]
) -> None:
    end = "<|endoftext|>" if template == "loop_last" else "<|im_end|>"
    tokenizer, row = tiny.tokenizer(TEMPLATES[template], eos_token=end), tiny.chat(*contents)
    for message, flag in zip(row["messages"], train, strict=True):
        message["train"] = flag
    assert trained_parts(encode(row, train_on, tokenizer), tokenizer) == parts
    everything = encode(row, "all", tokenizer)
    untrained = tokenizer.decode(everything.input_ids[~everything.trained].tolist())
    assert untrained == "".join(f"{contents[i]}<|im_end|>" for i, flag in enumerate(train) if flag is False)


def test_every_answer_and_its_end_token_are_trained_and_nothing_else() -> None:
    document = encode(tiny.chat("hello", "world ", "the <answer>?", "forty two\n"))
    text = tiny.tokenizer().decode(document.input_ids.tolist())
    assert text.startswith("<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")
    # The padding token is the end token too: its id decides nothing.
    ends = document.trained[document.input_ids == 2]
    assert ends.tolist() == [False, False, True, False, True]
    assert tiny.tokenizer().decode(document.input_ids[: document.prompt_tokens].tolist()).endswith("assistant\n")


def test_byte_tokenizer_masks() -> None:
    tokenizer = TextTokenizer(byte_files())
    document = encode(tiny.chat("h\u00e9", "\U0001f642", "x", "y"), tokenizer=tokenizer)
    assert trained_parts(document, tokenizer) == ["\U0001f642<|eos|>", "y<|eos|>"]


def test_a_prompt_that_is_not_what_stands_before_the_answer_is_refused() -> None:
    with pytest.raises(RecordProblem, match="differently when it is a prompt"):
        encode(tiny.chat("a", "b"), tokenizer=tiny.tokenizer(LOOP_LAST + "{% if add_generation_prompt %}X{% endif %}"))


@pytest.mark.parametrize(("template", "answer"), [("chatml", "\n\nb"), ("no_control", "hello")])
def test_a_token_over_the_boundary_is_cut_as_it_is_at_inference(template: str, answer: str) -> None:
    # Together "\n" of the prompt and "\n" of the answer are one token, and the space of "assistant: " is in " hello".
    tokenizer = tiny.tokenizer(TEMPLATES[template])
    row = tiny.chat("a", answer)
    batch = Encoder(tokenizer, "assistant").encode([parse_record(row)])
    assert (len(batch.records), batch.problems, batch.by_answer) == (1, {}, {})
    assert batch.notes[place.APART] == 1
    prompt = tokenizer.encode(tokenizer.render(row["messages"][:1], True))
    ids = batch.input_ids.tolist()
    assert ids[: len(prompt)] == prompt and tokenizer.decode(ids) == tokenizer.render(row["messages"])
    assert ids != tokenizer.encode(tokenizer.render(row["messages"]))
    assert int(batch.prompt_tokens[0]) == len(prompt) == int(np.argmax(batch.trained))


def test_prompt_and_completion() -> None:
    document = encode({"prompt": "hello", "completion": " world"})
    assert trained_parts(document) == [" world<|im_end|>"]
    assert document.prompt_tokens == len(tiny.tokenizer().encode("hello"))
    assert encode({"prompt": "hello", "completion": " world"}, "all").trained.all()
    # A token would straddle: the two are encoded apart, and the prompt's ids are the prompt's own.
    apart = encode({"prompt": "the ", "completion": "answer"})
    assert trained_parts(apart) == ["answer<|im_end|>"]
    assert apart.input_ids[: apart.prompt_tokens].tolist() == tiny.tokenizer().encode("the ")
    chat = {"prompt": tiny.chat("a", "b", "c")["messages"], "completion": [{"role": "assistant", "content": "d"}]}
    assert trained_parts(encode(chat)) == ["d<|im_end|>"]


def test_text_is_trained_whole_and_ended() -> None:
    document = encode({"text": "hello world"})
    assert document.trained.all()
    assert document.input_ids.tolist() == [*tiny.tokenizer().encode("hello world"), 2]


@pytest.mark.parametrize("row", cases(__file__, "control_tokens_in_text_are_refused"))
def test_control_tokens_in_text_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RecordProblem, match="control token"):
        encode(row)


def test_a_conversation_without_answer_has_nothing_trained() -> None:
    document = encode(tiny.chat("a"))
    assert not document.trained.any()
    assert document.prompt_tokens == 0


def test_control_tokens_in_text_are_escaped_on_wish() -> None:
    tokenizer = tiny.tokenizer()
    chat = tiny.chat("say <|im_end|>\n<|im_start|>assistant\nno", "<|im_end|> it is", "b", "c")
    examples = [parse_record(chat), parse_record({"text": "x <|endoftext|>"}), parse_record(tiny.chat("a", "b"))]
    batch = Encoder(tokenizer, "assistant", "escape").encode(examples)
    assert (batch.escaped, batch.problems, len(batch.records)) == (2, {}, 3)
    ids, trained = batch.input_ids[: batch.offsets[1]], batch.trained[: batch.offsets[1]]
    assert tokenizer.decode(ids.tolist()) == tokenizer.render(chat["messages"])
    # Only the template's own are control tokens: five turns with two each, the default system turn among them.
    assert np.isin(ids, sorted(tokenizer.special_ids)).sum() == 10
    plain = Document(ids.astype(np.int64), trained, 0, [])
    assert trained_parts(plain) == ["<|im_end|> it is<|im_end|>", "c<|im_end|>"]
    text = batch.input_ids[batch.offsets[1] : batch.offsets[2]].tolist()
    assert tokenizer.decode(text) == "x <|endoftext|><|im_end|>"
    assert tokenizer.encode("<|endoftext|>")[0] not in text


def test_noncharacters_are_no_text() -> None:
    for row in (tiny.chat("\ufdd4", "b"), tiny.chat("a", "\ufdd0b\ufdef"), {"text": "\ufdd5"}):
        with pytest.raises(RecordProblem, match="noncharacter"):
            encode(row)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
GOOD_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_what_a_template_does_not_write_is_noted() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [GOOD_CALL, GOOD_CALL], "reasoning_content": "because"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    batch = Encoder(tiny.tokenizer(), "assistant").encode([parse_record({"messages": messages, "tools": [TOOL]})])
    assert batch.notes == {turns.NOT_SHOWN: 1, turns.CALLS_AS_TEXT: 1, turns.SHORTENED: 1}
    call = '{"name": "f", "arguments": {"x": 1}}'
    assert trained_parts(batch) == [f"{call}\n{call}<|im_end|>", "two<|im_end|>"]


def test_the_end_of_turn_is_trained_or_it_is_said() -> None:
    open_ended = MARKED.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    batch = Encoder(tiny.tokenizer(open_ended), "assistant").encode([parse_record(tiny.chat("a", "b"))] * 3)
    assert batch.notes == {chat.OPEN_ENDED: 3}
    batch = Encoder(tiny.tokenizer(TEMPLATES["no_control"]), "assistant").encode([parse_record(tiny.chat("a", "\nb"))])
    assert batch.notes == {chat.NO_END: 1} and not batch.problems


def test_rows_that_are_tokens_already() -> None:
    row = Tokens([5, 6, 7, 8], [False, False, True, True])
    batch = Encoder(tiny.tokenizer(), "assistant").encode([row, Tokens([5, 6], None), Tokens([5, 100_000], None)])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 5, 6]
    assert batch.trained.tolist() == [False, False, True, True, True, True]
    assert batch.prompt_tokens.tolist() == [2, 1]
    assert "not in the vocabulary" in batch.problems[2].reason
    assert Encoder(tiny.tokenizer(), "all").encode([row]).trained.all()


def test_an_answer_after_a_shortened_prompt_begins_after_the_generation_prompt() -> None:
    tokenizer = tiny.tokenizer(TEMPLATES["shortens"].replace("HEADER", "A:"))
    batch = Encoder(tokenizer, "assistant").encode([parse_record(tiny.chat("A: hi", "b"))])
    assert batch.notes == {chat.REWRITTEN: 1}
    assert trained_parts(batch, tokenizer) == ["b<|im_end|>"]
    # The words of the prompt stand in the question too; where the answer is, something else does.
    with pytest.raises(RecordProblem, match="differently when it is a prompt"):
        encode(tiny.chat("A: hi", "b"), tokenizer=tiny.tokenizer(TEMPLATES["shortens"].replace("HEADER", "B:")))


def test_a_token_over_the_end_of_an_answer_that_more_follows() -> None:
    lines = "{% for m in messages %}er:{{ m.content }}{% endfor %}{% if add_generation_prompt %}er:{% endif %}"
    tokenizer = tiny.tokenizer(lines)
    assert trained_parts(encode(tiny.chat("(", "us"), tokenizer=tokenizer), tokenizer) == ["us"]
    # Once more follows, "us" of the answer and "er" of the template are one token: no model would end its answer so.
    batch = Encoder(tokenizer, "assistant").encode([parse_record(tiny.chat("(", "us", "(", ")"))])
    assert batch.by_answer == {0: ()}
    ids, bounds = batch.input_ids.astype(np.int64), pairwise(batch.offsets.tolist())
    documents = [Document(ids[a:b], batch.trained[a:b], 0, []) for a, b in bounds]
    assert [trained_parts(document, tokenizer) for document in documents] == [["us"], [")"]]
    with pytest.raises(RecordProblem, match="reaches over an end of the train: false"):
        row = tiny.chat("(", "us", "(", ")")
        row["messages"][1]["train"] = False
        encode(row, "all", tokenizer)


def test_generation_marks_never_reach_the_ids() -> None:
    demanding = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + MARKED
    tokenizer = tiny.tokenizer(demanding)
    messages = [{"role": "system", "content": "s"}, *tiny.chat("a", "b")["messages"]]
    document = encode({"messages": messages}, tokenizer=tokenizer)
    assert trained_parts(document, tokenizer) == ["b<|im_end|>"]
    assert not any(mark in tokenizer.render(messages) for mark in "\ufdd0\ufdd1")


def named_tokenizer(kind: str) -> TextTokenizer:
    """A tokenizer whose template for tools names them first, written down in one of three ways."""
    templates = {"default": tiny.CHATML, "tool_use": "{{ tools | length }} tools\n" + tiny.CHATML, "rag": "{{ 1 / 0 }}"}
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    config = {"list": {"chat_template": listed}, "dict": {"chat_template": templates}}.get(kind, {})
    files = {name: content for name, content in tiny.files(**config).items() if "jinja" not in name}
    if kind == "files":
        files["chat_template.jinja"] = templates["default"].encode()
        files["additional_chat_templates/tool_use.jinja"] = templates["tool_use"].encode()
    return TextTokenizer(files)


@pytest.mark.parametrize("kind", ["list", "dict", "files"])
def test_rows_with_tools_have_a_template_of_their_own(kind: str, tmp_path: Path) -> None:
    tokenizer = named_tokenizer(kind)
    tokenizer.save(tmp_path)
    for one in (tokenizer, tokenizer.__reduce__()[0](*tokenizer.__reduce__()[1])):
        for row in (tiny.chat("a", "b"), tiny.chat("a", "b", tools=[TOOL])):
            document = encode(row, tokenizer=one)
            assert trained_parts(document, one) == ["b<|im_end|>"]
            assert one.decode(document.input_ids.tolist()).startswith("1 tools") is ("tools" in row)
    assert tokenizer.template_hash != tiny.tokenizer().template_hash
    replaced = TextTokenizer(tokenizer.files, tiny.CHATML)
    assert replaced.template_hash == tiny.tokenizer().template_hash
    assert not any("additional" in name for name in replaced.files)
    # What is saved is what transformers takes.
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [TOOL]):
        messages = tiny.chat("a", "b")["messages"]
        rendered = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert rendered == tokenizer.render(messages, tools=tools)


@pytest.mark.parametrize("marked", [False, True])
def test_an_end_token_that_takes_white_space_is_trained_with_it(marked: bool) -> None:
    files = tiny.files(TEMPLATES["marked" if marked else "chatml"])
    spec = json.loads(files["tokenizer.json"])
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    tokenizer = TextTokenizer({**files, "tokenizer.json": json.dumps(spec).encode()})
    document = encode(tiny.chat("a", "b", "c", " d"), tokenizer=tokenizer)
    ids = np.array(document.input_ids)
    ends = tokenizer.encode("<|im_end|>\n \n")
    assert len(ends) == 1
    trained = [tokenizer.decode(part.tolist()) for part in np.split(ids, np.flatnonzero(np.diff(document.trained)) + 1)]
    assert trained[1::2] == ["b<|im_end|>", " d<|im_end|>"]


@pytest.mark.parametrize("endless", cases(__file__, "a_template_that_goes_on_for_ever_is_stopped"))
def test_a_template_that_goes_on_for_ever_is_stopped(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.data.encoding.template_limits.MAX_STEPS", 10_000)
    tokenizer = tiny.tokenizer("{% if messages[0].content == 'x' %}" + endless + "{% endif %}" + tiny.CHATML)
    assert trained_parts(encode(tiny.chat("a", "b"), tokenizer=tokenizer), tokenizer) == ["b<|im_end|>"]
    for _ in range(2):  # what one row used up is not missed by the next
        with pytest.raises(RecordProblem, match="goes beyond its limits"):
            encode(tiny.chat("x", "b"), tokenizer=tokenizer)
        assert tokenizer.render(tiny.chat("z" * 9)["messages"]).count("z") == 9


def test_the_documents_give_the_steps_that_a_template_may_take() -> None:
    text = (Path(__file__).parents[3] / "docs" / "masks.md").read_text(encoding="utf-8")
    assert f"more than {MAX_STEPS:,} steps" in text


def test_what_a_template_multiplies_within_limits_is_written() -> None:
    tokenizer = tiny.tokenizer("{{ 2 ** 10 }} {{ '-' * 5 }} {{ 3 * 4 }}")
    assert tokenizer.render(tiny.chat("a")["messages"]) == "1024 ----- 12"


def test_the_time_that_a_template_is_told_stays() -> None:
    tokenizer = tiny.tokenizer("{{ strftime_now('%f') }}" + MARKED)
    first = tokenizer.render(tiny.chat("a")["messages"])
    assert tokenizer.render(tiny.chat("a")["messages"]) == first
    kind, arguments = tokenizer.__reduce__()  # how a worker gets it
    assert kind(*arguments).render(tiny.chat("a")["messages"]) == first


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
def test_marks_are_those_that_transformers_reads(name: str, loaded: dict[str, TextTokenizer], tmp_path: Path) -> None:
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
