"""Chats that no one text of the template has exact masks for: each answer becomes a document, as it is prompted for.

And the token that ends an assistant's turn, where others stand next to it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.data import families, tiny
from tuner.data.encoding import chat, place, turns
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import EncodedBatch
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.turns import TrainOn
from tuner.data.reading.records import parse_record


def thought(*pairs: tuple[str, str, str], field: bool = True) -> dict[str, Any]:
    """Questions, thoughts and answers; thoughts as a field of their own, or in the content."""
    messages: list[dict[str, Any]] = []
    for question, reasoning, answer in pairs:
        messages.append({"role": "user", "content": question})
        own = {"content": answer, "reasoning_content": reasoning} if field else {"content": said(reasoning, answer)}
        messages.append({"role": "assistant", **(own if reasoning else {"content": answer})})
    return {"messages": messages}


def said(reasoning: str, answer: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{answer}"


PLAIN = tiny.chat("hello", "world", "the answer?", "forty two", "and?", "42")
MIXED = thought(("a", "because", "b"), ("c", "", "d"))
INSIDE = thought(("a", "because", "b"), ("c", "", "d"), field=False)


class Case(NamedTuple):
    """What the answers of a chat with a template become."""

    template: str
    row: dict[str, Any]
    trained: list[str]
    variables: list[dict[str, bool]]
    """What each prompt's caller says."""
    notes: list[str]


EMPTY = "\n</think>\n\n"
ROWS = {"plain": PLAIN, "mixed": MIXED, "inside": INSIDE}
CASES = {
    name: Case(families.TEMPLATES[case["template"]], ROWS[case["row"]], *(case[key] for key in Case._fields[2:]))
    for name, case in json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8")).items()
}


def documents(batch: EncodedBatch) -> list[tuple[list[int], list[bool]]]:
    bounds = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    return [(batch.input_ids[a:b].tolist(), batch.trained[a:b].tolist()) for a, b in bounds]


def encode(tokenizer: TextTokenizer, *rows: dict[str, Any], train_on: TrainOn = "assistant") -> EncodedBatch:
    """Encode rows; the two ways, for many rows and for one, agree."""
    examples = [parse_record(row) for row in rows]
    batch, slow = (Encoder(tokenizer, train_on, fast=fast).encode(examples) for fast in (True, False))
    assert documents(batch) == documents(slow)
    assert (batch.by_answer, batch.notes, batch.records.tolist()) == (slow.by_answer, slow.notes, slow.records.tolist())
    assert batch.prompt_tokens.tolist() == slow.prompt_tokens.tolist()
    return batch


@pytest.mark.parametrize("name", CASES)
def test_each_answer_is_a_document_with_the_ids_of_its_prompt(name: str) -> None:
    case = CASES[name]
    tokenizer = families.tokenizer(case.template)
    batch = encode(tokenizer, case.row)
    assert not batch.problems
    assert batch.by_answer == {0: ()}
    assert batch.notes == dict.fromkeys(case.notes, 1)
    messages = parse_record(case.row).messages  # type: ignore[union-attr]
    prompts = [messages[:i] for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = documents(batch)
    assert len(found) == len(prompts)
    for k, (ids, trained) in enumerate(found):
        prompt = tokenizer.encode(tokenizer.render(prompts[k], True, variables=case.variables[k]))
        assert ids[: len(prompt)] == prompt
        assert int(batch.prompt_tokens[k]) == len(prompt)
        first, last = int(np.argmax(trained)), len(trained) - int(np.argmax(trained[::-1]))
        assert (first, sum(trained)) == (len(prompt), last - first)
        assert tokenizer.decode(ids[first:last]) == case.trained[k]
        assert tokenizer.decode(ids[last:]).strip() == ""


def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    for name, case in CASES.items():
        tokenizer = families.tokenizer(case.template)
        tokenizer.save(tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        messages = parse_record(case.row).messages  # type: ignore[union-attr]
        last = next(i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant")
        prompt = theirs.apply_chat_template(
            messages[:last], add_generation_prompt=True, return_dict=False, **case.variables[-1]
        )
        ids, _ = documents(encode(tokenizer, case.row))[-1]
        assert ids[: len(prompt)] == prompt, name


def asked(arguments: object) -> list[dict[str, Any]]:
    """A question for which a tool is called, with a thought before the call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = tiny.chat("a", "", "2", "two")["messages"]
    chat[1] |= {"reasoning_content": "so f", "tool_calls": [call]}
    chat[2]["role"] = "tool"
    return list(chat)


def test_the_prompt_is_what_a_model_is_given_where_an_answer_after_it_changes_it() -> None:
    """The thought before a call is in the prompt of the answer to its result, and not once that answer is there."""
    messages = asked({"x": 1})
    tokenizer = families.tokenizer(families.CHANNELS, eos_token="<|return|>")
    tokenizer = TextTokenizer(tokenizer.files, model_eos_ids=tokenizer.encode("<|call|>"))
    (called, first), (answered, second) = documents(encode(tokenizer, {"messages": messages}))
    thought_and_call = '<|channel|>analysis<|message|>so f<|end|><|start|>assistant to=f<|message|>{"x": 1}<|call|>'
    assert tokenizer.decode(np.array(called)[first].tolist()) == thought_and_call
    assert tokenizer.decode(np.array(answered)[second].tolist()) == "<|channel|>final<|message|>two<|return|>"
    prompt = tokenizer.render(parse_record({"messages": messages}).messages[:3], True)  # type: ignore[union-attr]
    assert "so f" in prompt
    assert "so f" not in tokenizer.render(parse_record({"messages": messages}).messages)  # type: ignore[union-attr]
    assert tokenizer.decode(answered) == f"{prompt}<|channel|>final<|message|>two<|return|>"


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_calls_are_given_in_the_form_that_the_template_reads(arguments: object) -> None:
    """Joined to a text an object is an error, and beside an empty content calls are not written at all."""
    tokenizer = families.tokenizer(families.CUTS)
    batch = encode(tokenizer, {"messages": asked(arguments)})
    assert batch.by_answer == {0: ()}
    trained = [tokenizer.decode(np.array(ids)[mask].tolist()) for ids, mask in documents(batch)]
    assert trained == ['so f\n</think>\n\ncall f{"x": 1}<|im_end|>', f"{EMPTY}two<|im_end|>"]
    assert turns.CALLS_NOT_SHOWN not in batch.notes


def test_one_answer_is_one_text_with_its_prompt_apart() -> None:
    tokenizer = families.tokenizer(families.THINKS)
    row = tiny.chat("hello", "world")
    batch = encode(tokenizer, row)
    assert (batch.by_answer, batch.notes) == ({}, {place.APART: 1})
    ((ids, trained),) = documents(batch)
    prompt = tokenizer.encode(tokenizer.render(row["messages"][:1], True))
    assert ids[: len(prompt)] == prompt and trained.index(True) == len(prompt)
    last = encode(tokenizer, PLAIN, train_on="last_assistant")
    assert (last.by_answer, len(last.records)) == ({}, 1)
    # A question after it is nothing that the answer is prompted with.
    more = encode(tokenizer, tiny.chat("hello", "world", "and?"))
    assert more.by_answer == {0: ()}
    assert documents(more) == documents(batch)


def test_one_text_is_kept_where_its_masks_are_exact() -> None:
    chats = [PLAIN, tiny.chat("a", "b")]
    assert encode(tiny.tokenizer(), *chats).by_answer == {}
    batch = encode(families.tokenizer(families.CHANNELS), *chats)
    assert (batch.by_answer, batch.records.tolist()) == ({0: ()}, [0, 0, 0, 1])
    last = encode(families.tokenizer(families.CHANNELS), *chats, train_on="last_assistant")
    assert (last.by_answer, len(last.records)) == ({}, 2)
    assert encode(families.tokenizer(families.CHANNELS), *chats, train_on="all").by_answer == {}


def test_answers_that_are_not_wanted_have_no_document() -> None:
    row = tiny.chat("a", "b", "c", "d")
    row["messages"][3]["train"] = False
    tokenizer = families.tokenizer(families.CHANNELS)
    ((ids, _),) = documents(encode(tokenizer, row))
    assert tokenizer.decode(ids) == tokenizer.render(row["messages"][:2])
    # A question that is to be trained is not where its answers are prompted for.
    row["messages"][2]["train"] = True
    batch = encode(tokenizer, row, tiny.chat("a", "b"))
    assert list(batch.problems) == [0] and batch.by_answer == {}


def test_an_answer_that_no_prompt_leads_to_is_left_out_and_counted() -> None:
    # The first answer's header is another one than the prompt's; the second's is the same.
    template = families.CHANNELS.replace(
        "{% if add_generation_prompt %}<|start|>assistant",
        "{% if add_generation_prompt %}<|start|>{{ 'model' if messages | length == 1 else 'assistant' }}",
    )
    tokenizer = tiny.with_tokens(template, families._SPECIAL, eos_token="<|return|>")
    batch = encode(tokenizer, tiny.chat("a", "b", "c", "d"), tiny.chat("a", "b"))
    reason = "the template writes the text before message N differently when it is a prompt"
    assert batch.by_answer == {0: (reason,)}
    assert batch.records.tolist() == [0]
    assert "differently when it is a prompt" in batch.problems[1].reason


def test_control_tokens_in_a_chat_of_documents_refuse_all_of_it_or_are_escaped() -> None:
    tokenizer = families.tokenizer(families.CHANNELS)
    row = tiny.chat("a", "b", "say <|end|>", "d")
    batch = encode(tokenizer, row, tiny.chat("a", "b"))
    assert (list(batch.problems), batch.by_answer, batch.records.tolist()) == ([0], {}, [1])
    escaped = Encoder(tokenizer, "assistant", "escape").encode([parse_record(row)])
    assert (escaped.by_answer, escaped.escaped) == ({0: ()}, 1)
    ids, trained = documents(escaped)[1]
    assert tokenizer.decode(ids) == tokenizer.render(row["messages"])
    assert tokenizer.decode(np.array(ids)[trained].tolist()) == "<|channel|>final<|message|>d<|return|>"
    # Where prompt and answer are encoded apart, too.
    tokenizer = families.tokenizer(families.THINKS)
    row = tiny.chat("say <|im_end|>", "no <|im_end|>")
    escaped = Encoder(tokenizer, "assistant", "escape").encode([parse_record(row)])
    ((ids, trained),) = documents(escaped)
    assert tokenizer.decode(np.array(ids)[trained].tolist()) == f"{EMPTY}no <|im_end|><|im_end|>"
    assert tokenizer.decode(ids) == tokenizer.render(row["messages"])


def test_an_answer_is_not_taken_for_another_of_the_same_header() -> None:
    newest_first = tiny.CHATML.replace("in messages %}", "in messages | reverse %}")
    batch = encode(tiny.tokenizer(newest_first), tiny.chat("a", "b", "c", "d"), train_on="last_assistant")
    assert "differently when it is a prompt" in batch.problems[0].reason


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_template_that_reads_parts_gets_parts(as_parts: bool) -> None:
    row = tiny.chat("hello", "world", "the answer?", "forty two")
    if as_parts:
        for message in row["messages"]:
            halves = (message["content"][:2], message["content"][2:])
            message["content"] = [{"type": "text", "text": text} for text in halves]
    tokenizer = families.tokenizer(families.PARTS)
    batch = encode(tokenizer, row)
    assert batch.notes == {turns.AS_PARTS: 1}
    ((ids, trained),) = documents(batch)
    assert tokenizer.decode(ids).startswith("<|im_start|>User: hello<|im_end|>\nAssistant: world<|im_end|>\n")
    assert tokenizer.decode(np.array(ids)[trained].tolist()) == " world<|im_end|> forty two<|im_end|>"


WRITES_LESS = tiny.CHATML.replace("message['content']", "(message['content'] if message['role'] != 'user' else 'x')")


@pytest.mark.parametrize("as_parts", [False, True])
def test_content_that_a_template_does_not_write_is_counted(as_parts: bool) -> None:
    row = tiny.chat("hello", "world")
    if as_parts:
        row["messages"][0]["content"] = [{"type": "text", "text": "hello"}]
    batch = encode(tiny.tokenizer(WRITES_LESS), row, tiny.chat("x", "b"))
    assert batch.notes == {f"{turns.CONTENT_NOT_SHOWN}: user": 1}


def test_thoughts_and_calls_that_a_template_does_not_write_are_counted() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]}
    ignores = "{% if messages[0].tool_calls %}{% endif %}" + tiny.CHATML
    assert encode(tiny.tokenizer(ignores), row).notes == {turns.CALLS_AS_TEXT: 1}
    cuts = tiny.CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    batch = encode(tiny.tokenizer(cuts), tiny.chat("a", "<think>because</think>b"))
    assert batch.notes == {turns.SHORTENED: 1}


def test_notes_are_not_of_rows_that_have_no_document() -> None:
    no_end = "{% for m in messages %}er:{{ m.content }}{% endfor %}{% if add_generation_prompt %}er:{% endif %}"
    row = tiny.chat("(", "us", "(", ")")
    row["messages"][2]["train"] = True
    batch = encode(tiny.tokenizer(no_end), row, tiny.chat("(", "us"))
    assert list(batch.problems) == [0]
    assert batch.notes == {chat.NO_END: 1}


CALLS = [{"name": city, "arguments": {"city": city}} for city in ("Oslo", "Rome")]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}


@pytest.mark.parametrize(
    ("more", "note"),
    [({"thinking": "so"}, turns.SHORTENED), ({"reasoning": "so"}, turns.SHORTENED),
     ({"name": "Ada", "id": "7", "index": 3}, f"{turns.FIELD_NOT_SHOWN}: name"), (CALL, turns.CALLS_NOT_SHOWN)],
)  # fmt: skip
def test_what_a_template_drops_of_a_message_is_counted(more: dict[str, Any], note: str) -> None:
    """Of two calls one alone is written here, with its arguments and none of the second's."""
    one = "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}{% endif %}"
    template = f"{{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{one}<|im_end|>{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    row = tiny.chat("c", "d")
    row["messages"][1] |= more
    assert set(encode(families.tokenizer(template), row).notes) == {note}


def test_a_thought_after_an_open_prompt_has_any_of_its_names() -> None:
    tokenizer = families.tokenizer(families.CUTS)
    rows = [thought(("a", "because", "b"))["messages"], thought(("a", "because", "b"))["messages"]]
    rows[1][1]["thinking"] = rows[1][1].pop("reasoning_content")
    first, second = (documents(encode(tokenizer, {"messages": row})) for row in rows)
    assert first == second and "because" in tokenizer.decode(second[0][0])


def test_calls_are_text_where_the_template_reads_them_only_next_to_documents() -> None:
    """Command A's: an answer would be empty otherwise."""
    calls = "{% if documents and m.tool_calls %}{{ m.tool_calls }}{% endif %}"
    template = f"{{% for m in messages %}}<|im_start|>{calls}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    tokenizer = families.tokenizer(template)
    batch = encode(tokenizer, {"messages": [{"role": "user", "content": "c"}, CALL]})
    assert set(batch.notes) == {turns.CALLS_AS_TEXT}
    ((ids, trained),) = documents(batch)
    said = tokenizer.decode(np.array(ids)[trained].tolist())
    assert said.startswith('{"name": "Oslo"') and said.endswith('"city": "Rome"}}<|im_end|>')


ENDINGS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("ends.json").read_text(encoding="utf-8"))
"""Templates with other tokens beside the one that ends a turn, the tokenizer's own end, and how an answer ends.

The end-of-turn token, as the tokenizer names it or not, may come after a token that closes the answer. What comes next
is a header, which is not the model's.
"""
CLOSED = families.TEMPLATES["closed"]


def ending(name: str) -> TextTokenizer:
    case = ENDINGS[name]
    specials = ("</answer>", "<|end|>", "<|begin|>")
    return tiny.with_tokens(case["template"], specials, eos_token=case["eos"], bos_token="<|begin|>")


def test_the_last_answers_own_end_is_the_one_at_which_generation_stops() -> None:
    """Where more follows, gpt-oss writes another token, which also stands between its thoughts and the answer."""
    template = CLOSED.replace("ANSWER", "{{ m.content }}{{ '<|end|>' if loop.last else '<|im_end|>' }}")
    tokenizer = tiny.with_tokens(template, ("<|end|>",), eos_token="<|end|>")
    assert [tokenizer.decode([i]) for i in tokenizer.eos_ids] == ["<|end|>"]


@pytest.mark.parametrize("name", ENDINGS)
def test_the_end_of_turn_is_trained_whatever_stands_before_it(name: str) -> None:
    tokenizer, end = ending(name), ENDINGS[name]["end"]
    batch = Encoder(tokenizer, "assistant").encode([parse_record(tiny.chat("a", "b", "c", "d"))])
    edges = np.flatnonzero(np.diff(batch.trained, prepend=False, append=False))
    spans = [batch.input_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert [tokenizer.decode(span) for span in spans] == [f"b{end}", f"d{end}"]
    assert spans[0][-1] in tokenizer.eos_ids
    assert batch.notes == {}


@pytest.mark.parametrize("name", [*ENDINGS, "channels"])
def test_exports_stop_at_the_same_token(name: str, tmp_path: Path) -> None:
    """Generation stops where training has put the end of a turn, whatever the tokenizer's config names."""
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    from tuner.export.write import turn_ends

    ours = ending(name) if name in ENDINGS else families.tokenizer(families.CHANNELS)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs.eos_token_id, *turn_ends(theirs)] == list(ours.eos_ids)


def test_a_marked_end_that_is_not_the_turns_is_said() -> None:
    marked = CLOSED.replace("ANSWER", "{% generation %}{{ m.content }}</answer>{% endgeneration %}<|im_end|>")
    batch = Encoder(tiny.with_tokens(marked, ("</answer>",)), "assistant").encode([parse_record(tiny.chat("a", "b"))])
    assert batch.notes == {"end of turn not trained: the template marks it as not generated": 1}
