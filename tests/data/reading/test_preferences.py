"""Preference and labelled rows of every form, and those that are none: reason, place and the line to write."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.data.reading.test_records import CALL, TOOL, answer, turn, user
from tuner.config.methods import ExampleKind
from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import position_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import Reading, proposals, reading_for
from tuner.data.reading.records import (
    Conversation,
    Labelled,
    Pair,
    PromptCompletion,
    parse_compared,
    parse_record,
)


def chat(*messages: dict[str, Any], earlier: int = 0, tools: Any = None) -> Conversation:
    """A conversation of which `earlier` answers before the last message are learned too."""
    flags: list[bool | None] = [None] * len(messages)
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"][:-1]
    for i in said[len(said) - earlier :]:
        flags[i] = True
    return Conversation(list(messages), flags, tools)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


BOTH = chat(user(), answer("a")), chat(user(), answer("b"))
ULTRA = {"chosen": [user(), answer("a")], "rejected": [user(), answer("b")], "score_chosen": 8.5, "score_rejected": 7}
PAIRS: dict[str, tuple[dict[str, Any], Pair]] = {
    "texts": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "id": 3},
        Pair(PromptCompletion("q", "a"), PromptCompletion("q", "b")),
    ),
    "texts without a prompt": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: I am", "rejected": "\n\nHuman: hi\n\nAssistant: I amble"},
        Pair(
            PromptCompletion("\n\nHuman: hi\n\nAssistant: I", " am"),
            PromptCompletion("\n\nHuman: hi\n\nAssistant: I", " amble"),
        ),
    ),
    "messages": ({"prompt": [user()], "chosen": [answer("a")], "rejected": [answer("b")]}, Pair(*BOTH)),
    "a message for an answer": ({"prompt": [user()], "chosen": answer("a"), "rejected": answer("b")}, Pair(*BOTH)),
    "texts after messages": ({"prompt": [user()], "chosen": "a", "rejected": "b", "margin": -0.5}, Pair(*BOTH, -0.5)),
    "messages after a text": ({"prompt": "q", "chosen": [answer("a")], "rejected": [answer("b")]}, Pair(*BOTH)),
    "messages that repeat the prompt": (
        {"prompt": [user()], "chosen": [user(), answer("a")], "rejected": [user(), answer("b")]},
        Pair(*BOTH),
    ),
    "no prompt": ({**ULTRA, "score_rejected": None}, Pair(*BOTH)),
    "scores, and a prompt that messages repeat": (
        {**ULTRA, "prompt": " q\n", "messages": ULTRA["chosen"]},
        Pair(*BOTH, 1.5),
    ),
    "other names": ({"chosen_messages": ULTRA["chosen"], "rejected_messages": ULTRA["rejected"]}, Pair(*BOTH)),
    "lists as text": (
        {"prompt": json.dumps([user()]), "chosen": json.dumps([answer("a")]), "rejected": "[]", "margin": " 2e-1"}
        | {"rejected": json.dumps([answer("b")])},
        Pair(*BOTH, 0.2),
    ),
    "several answers and a tool": (
        {
            "prompt": [user()],
            "chosen": [answer("", tool_calls=[CALL]), {"role": "tool", "content": "1"}, answer("a")],
            "rejected": [answer("b")],
            "tools": [TOOL],
        },
        Pair(
            chat(
                user(),
                answer("", tool_calls=[CALL]),
                {"role": "tool", "content": "1"},
                answer("a"),
                earlier=1,
                tools=[TOOL],
            ),
            chat(user(), answer("b"), tools=[TOOL]),
        ),
    ),
    "a shared beginning of answers": (
        {
            "chosen": [user(), answer("x"), user("r"), answer("a")],
            "rejected": [user(), answer("x"), user("r"), answer("b")],
        },
        Pair(*(chat(user(), answer("x"), user("r"), answer(text)) for text in "ab")),
    ),
    "answers of different lengths": (
        {"chosen": [user(), answer("x"), user("r"), answer("a")], "rejected": [user(), answer("b")]},
        Pair(chat(user(), answer("x"), user("r"), answer("a"), earlier=1), BOTH[1]),
    ),
    "sharegpt": (
        {
            "conversations": [turn("human", "q")],
            "chosen": turn("gpt", "a"),
            "rejected": turn("gpt", "b"),
            "system": "s",
        },
        Pair(*(chat(system("s"), user(), answer(text)) for text in "ab")),
    ),
    "sharegpt without a prompt": (
        {"chosen": [turn("human", "q"), turn("gpt", "a")], "rejected": [turn("human", "q"), turn("gpt", "b")]},
        Pair(*BOTH),
    ),
    "alpaca": (
        {"instruction": "do", "input": "it", "chosen": "a", "rejected": "b", "history": [["x", "y"]], "system": "s"},
        Pair(*(chat(system("s"), user("x"), answer("y"), user("do\nit"), answer(text)) for text in "ab")),
    ),
    "flags that agree": (
        {"prompt": [user(weight=0)], "chosen": [answer("a", train=True)], "rejected": [answer("b", loss_weight=1)]},
        Pair(*BOTH),
    ),
    "the prompt in messages": ({"messages": [user()], "chosen": "a", "rejected": "b"}, Pair(*BOTH)),
}
LABELLED: dict[str, tuple[dict[str, Any], Labelled]] = {
    "texts": ({"prompt": "q", "completion": "a", "label": True}, Labelled(PromptCompletion("q", "a"), True)),
    "messages": ({"messages": [user(), answer("a")], "label": False}, Labelled(BOTH[0], False)),
    "the last answer": (
        {"messages": [user(), answer("x"), user("r"), answer("a")], "label": 1},
        Labelled(chat(user(), answer("x"), user("r"), answer("a")), True),
    ),
    "both": ({"prompt": [user()], "completion": [answer("a")], "label": 0}, Labelled(BOTH[0], False)),
    "text after messages": ({"prompt": [user()], "completion": "a", "label": "False"}, Labelled(BOTH[0], False)),
    "llama-factory": (
        {"instruction": "q", "input": "", "output": "a", "kto_tag": True},
        Labelled(BOTH[0], True),
    ),
    "sharegpt": (
        {"conversations": [turn("human", "q"), turn("gpt", "a")], "kto_tag": False, "system": "s"},
        Labelled(chat(system("s"), user(), answer("a")), False),
    ),
}
_TEXTS = {"prompt": "q", "chosen": "a", "rejected": "b"}
BAD: list[tuple[ExampleKind, dict[str, Any], str, str]] = [
    ("preference", {**_TEXTS, "rejected": "a"}, "chosen and rejected are equal", '"a"'),
    ("preference", {**_TEXTS, "rejected": " \n"}, "rejected is empty", '" '),
    ("preference", {**_TEXTS, "chosen": None}, "chosen is null", "null"),
    ("preference", {**_TEXTS, "rejected": None}, "rejected is null", "null"),
    ("unpaired", {"prompt": "q", "completion": "a", "label": None}, "label is null", "null"),
    ("preference", {**_TEXTS, "chosen": 3}, "chosen is a text or a list of messages, got a number", "3"),
    ("preference", {**_TEXTS, "chosen": [answer("a")]}, "one is a text and one a list", '"b"'),
    ("preference", {**_TEXTS, "prompt": 3}, "prompt is a string, got a number", "3"),
    ("preference", {**_TEXTS, "margin": "x"}, "margin is a number, got a string", '"x"'),
    ("preference", {**_TEXTS, "margin": True}, "margin is a number, got true or false", "true"),
    ("preference", {**_TEXTS, "margin": 1e39}, "margin is too large", "1e+39"),
    ("preference", {**_TEXTS, "images": ["a.png"]}, "images, audio and video cannot be trained", '["a.png"]'),
    ("preference", {"chosen": "one", "rejected": "two"}, "no prompt: chosen and rejected do not begin", '"one"'),
    ("preference", {"chosen": [answer("a")], "rejected": [answer("b")]}, "no prompt: chosen and rejected begin", "["),
    (
        "preference",
        {"chosen": [user("x"), answer("a")], "rejected": [user("y"), answer("b")]},
        "the prompts of chosen and rejected differ",
        '{"role": "user", "content": "x"}',
    ),
    (
        "preference",
        {"prompt": [user("x")], "chosen": [user("x"), answer("a")], "rejected": [user("y"), answer("b")]},
        "rejected does not repeat the prompt",
        '[{"role": "user", "content": "y"}',
    ),
    (
        "preference",
        {"prompt": "x", "chosen": [user("z"), answer("a")], "rejected": [user("z"), answer("b")]},
        "rejected does not repeat the prompt",
        '[{"role": "user", "content": "z"}, {"role": "assistant", "content": "b"',
    ),
    (
        "preference",
        {"chosen": [user(), answer("a")], "rejected": [user(), answer("a"), user(), answer("b")]},
        "chosen is empty: it has no message after the prompt",
        '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "r',
    ),
    (
        "preference",
        {"prompt": [user()], "chosen": [answer(" ")], "rejected": [answer("b")]},
        "chosen is empty",
        '[{"role": "as',
    ),
    ("preference", {"prompt": [user()], "chosen": [], "rejected": [answer("b")]}, "chosen is empty", "[], "),
    ("preference", {"prompt": [], "chosen": "a", "rejected": "b"}, "prompt is empty", "[], "),
    (
        "preference",
        {"prompt": [user(train=True)], "chosen": "a", "rejected": "b"},
        "train or weight of a message contradicts",
        '[{"role": "user"',
    ),
    (
        "preference",
        {"prompt": [user()], "chosen": [answer("a", train=False)], "rejected": [answer("b")]},
        "train or weight of a message contradicts",
        '[{"role": "assistant", "content": "a"',
    ),
    (
        "preference",
        {"prompt": [user()], "chosen": answer(3), "rejected": "b"},
        "content is a string, got a number",
        "3",
    ),
    (
        "preference",
        {"conversations": [turn("system", "x"), turn("human", "q")], "system": "y", "chosen": "a", "rejected": "b"},
        "a system prompt both",
        '"y"',
    ),
    ("unpaired", {"prompt": "q", "completion": "a", "label": 2}, "label is true or false, got 2", "2"),
    ("unpaired", {"prompt": "q", "completion": "a", "label": "yes"}, "label is true or false, got a string", '"yes"'),
    ("unpaired", {"prompt": "q", "completion": "a", "label": [1]}, "label is true or false, got a list", "[1]"),
    ("unpaired", {"messages": [user()], "label": True}, "the last message of messages is no answer", '{"role"'),
    ("unpaired", {"messages": [answer()], "label": True}, "messages has no prompt before the answer", '[{"role"'),
    ("unpaired", {"messages": [user(), answer("")], "label": True}, "messages is empty: no word", '[{"role"'),
    ("unpaired", {"prompt": "q", "completion": " ", "label": True}, "completion is empty", '" "'),
    ("unpaired", {"text": "q", "label": True}, "no messages, conversations, prompt + completion or", '{"text"'),
]
OTHER_METHODS: list[tuple[ExampleKind, dict[str, Any], str, list[dict[str, Any]]]] = [
    ("preference", {"messages": [user(), answer()]}, "no chosen [+] rejected; the row has", [{"method": "sft"}]),
    ("preference", {"text": "x"}, "no chosen [+] rejected; the row has 'text'", [{"method": "pretrain"}]),
    ("preference", {"messages": [user(), answer()], "label": True}, "but a label", [{"method": "kto"}]),
    ("preference", {"x": 1}, "no chosen [+] rejected; the row has 'x'$", []),
    (
        "preference",
        {"question": "q", "preferred": "a", "non_preferred": "b"},
        "no chosen [+] rejected; the row has",
        [{"columns": {"instruction": "question", "chosen": "preferred", "rejected": "non_preferred"}}],
    ),
    (
        "preference",
        {"system": "s", "question": "what is it?", "chosen": "It is a", "rejected": "It is b"},
        "no prompt: question is not read",
        [{"columns": {"instruction": "question"}}],
    ),
    ("unpaired", {"messages": [user(), answer()]}, "no label; the row has", [{"method": "sft"}]),
    ("unpaired", _TEXTS, "a preference row: it has two answers and no label", [{"method": "dpo"}]),
    ("sft", _TEXTS, "a preference row", [{"columns": {"completion": "chosen"}}, {"method": "dpo"}]),
    ("sft", {"chosen": [user()], "rejected": [user()]}, "a preference row", []),
    ("sft", {**_TEXTS, "rejected": "a"}, "a preference row", [{"columns": {"completion": "chosen"}}]),
    ("sft", {"messages": [user(), answer()], "label": True}, "a labelled row .label.", [{"method": "kto"}]),
    ("sft", {"messages": [user(), answer()], "kto_tag": False}, "a labelled row .kto_tag.", [{"method": "kto"}]),
]


def parsed(kind: ExampleKind, row: dict[str, Any], *given: Any) -> Any:
    return parse_compared(row, kind, *given) if kind in {"preference", "unpaired"} else parse_record(row, *given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_form(name: str) -> None:
    row, wanted = PAIRS[name]
    before = copy.deepcopy(row)
    assert parsed("preference", row) == wanted
    assert row == before and reading_for([row], chats=True) == Reading("preference")


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers_of_every_form(name: str) -> None:
    row, wanted = LABELLED[name]
    before = copy.deepcopy(row)
    assert parsed("unpaired", row) == wanted
    assert row == before
    is_said = str(row.get("label", row.get("kto_tag"))).lower() in {"true", "false"}
    assert reading_for([row], chats=True).kind == ("unpaired" if is_said else "sft")


@pytest.mark.parametrize(("kind", "row", "reason", "at"), BAD, ids=[reason for *_, reason, _ in BAD])
def test_rows_that_compare_nothing_are_refused_at_their_place(
    kind: ExampleKind, row: dict[str, Any], reason: str, at: str
) -> None:
    raw = json.dumps(row).encode()
    with pytest.raises(RecordProblem) as caught:
        parsed(kind, row)
    assert reason in caught.value.reason
    _, col = position_of(RawRecord(1, raw, row, None), caught.value)
    assert raw[col - 1 :].decode().startswith(at)


@pytest.mark.parametrize(("kind", "row", "reason", "lines"), OTHER_METHODS)
def test_rows_of_another_method_name_it(
    kind: ExampleKind, row: dict[str, Any], reason: str, lines: list[dict[str, Any]]
) -> None:
    with pytest.raises(RecordProblem, match=reason):
        parsed(kind, row)
    assert [proposal.lines for proposal in proposals(row, [row], Reading(kind), chats=True)] == lines


def test_columns_and_forms_of_pairs() -> None:
    row = {"input": {"messages": [user()]}, "good": [answer("a")], "bad": [answer("b")], "prompt": "other"}
    columns = {"prompt": "input.messages", "chosen": "good", "rejected": "bad"}
    assert parsed("preference", row, "auto", columns) == Pair(*BOTH)
    with pytest.raises(RecordProblem, match="no 'better', which columns names for chosen"):
        parsed("preference", row, "auto", {**columns, "chosen": "better"})
    with pytest.raises(RecordProblem, match="good is empty|chosen is empty") as caught:
        parsed("preference", {**row, "good": [answer(" ")]}, "auto", columns)
    assert caught.value.path == ("good",)
    assert parsed(
        "unpaired", {"q": "q", "a": "a", "ok": 1}, "auto", {"prompt": "q", "completion": "a", "label": "ok"}
    ) == (Labelled(PromptCompletion("q", "a"), True))
    spoken = {"conversations": [{"role": "human", "content": "q"}], "chosen": "a", "rejected": "b", "prompt": "other"}
    assert parsed("preference", spoken, "sharegpt") == Pair(*BOTH)
    with pytest.raises(RecordProblem, match="unknown role 'human'"):
        parsed("preference", {**spoken, "prompt": None})
    both = {"prompt": "p", "instruction": "q", "chosen": "a", "rejected": "b"}
    assert parsed("preference", both, "alpaca") == Pair(*BOTH)
    assert parsed("preference", both) == Pair(PromptCompletion("p", "a"), PromptCompletion("p", "b"))
