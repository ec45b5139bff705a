"""The written set: equal to the reference, or refused where the reference itself has no exact mask."""

import os
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.reference import assets, hf, product, written
from tests.reference.compare import difference
from tests.reference.formats import Chat, chat_of, for_template, read
from tests.reference.templates import CHATML_WHOLE, HAND_MADE, IMPOSSIBLE, MARKED, unmarked
from tests.reference.written import turns


class Wanted(NamedTuple):
    """What one conversation should become."""

    whole: product.Encoded
    """Its ids and mask as one document."""
    exact: bool
    """Whether that mask is exact."""
    by_answer: Callable[[], list[list[product.Encoded]]] = list
    """Else a document for each answer: what it may be. Many renderings, made where they are asked for."""


Reference = Callable[[str], Wanted]
"""By the conversation's name."""
Result = tuple[list[product.Encoded], dict[str, str]]
"""Documents in order, and the reasons of the refused rows by the conversations' names."""
ALL = {**written.PLAIN, **written.TOOLS, **written.UNPROMPTED}


@pytest.fixture(autouse=True, scope="module")
def _one_parse() -> Iterator[None]:
    with product.parsed_once():
        yield


def run(
    work: Path,
    model: Path,
    chats: dict[str, Chat],
    *,
    template: str | None = None,
    train_on: str = "assistant",
    special_tokens: str = "refuse",
) -> Result:
    """Prepare the conversations in this process. One in which nothing is trained is dropped, and in neither part."""
    rows = product.write_rows(work / "rows.jsonl", [chat.row() for chat in chats.values()])
    tokenizer = {"special_tokens_in_text": special_tokens}
    if template is not None:
        (work / "template.jinja").write_text(template, encoding="utf-8")
        tokenizer["chat_template"] = str(work / "template.jinja")
    # A document of its own comes first, so that no run is empty.
    first = product.write_rows(work / "first.jsonl", [{"text": "not empty"}])
    recipe = {
        "model": {"name_or_path": str(model)},
        "tokenizer": tokenizer,
        "data": {"train": [str(first), str(rows)], "max_length": 2048, "on_bad_row": "skip"},
        "method": {"kind": "sft", "train_on": train_on},
    }
    return named(chats, product.prepare_here(recipe), 1)


def named(chats: dict[str, Chat], prepared: product.Prepared, skip: int) -> Result:
    """The documents after the first `skip`, and the refused rows of the last file by the conversations' names."""
    names = list(chats)
    refused = {names[reject["line"] - 1]: reject["reason"] for reject in prepared.rejects}
    return prepared.documents[skip:], refused


def policy(chat: Chat, train_on: str) -> list[bool]:
    """Whether each message is trained, by the documented rule: its own flag wins."""
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    rule = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(chat.messages))}[train_on]
    return [i in rule if own is None else own for i, own in enumerate(chat.train)]


def verdicts(
    chats: dict[str, Chat],
    tokenizer: Any,
    result: Result,
    reference: Reference,
    may_refuse: Collection[str] = tuple(written.UNPROMPTED),
) -> list[str]:
    """What is wrong: a conversation equals its reference, is one document for each answer, or is refused.

    The second only where no mask of the whole is exact, and refused only where none of an answer is either. Those in
    `may_refuse` may be refused or written by answer all the same: never may a mask be another one. One with an answer
    that says nothing has to be refused for that.
    """
    documents, refused = result
    wrong, at = [], 0
    for name, one in chats.items():
        wanted, free = reference(name), name in may_refuse
        if has_empty_answer(one):
            if "an answer is empty" not in refused.get(name, ""):
                wrong.append(f"{name}: an empty answer is not refused")
            continue
        if name in refused:
            if not free and (wanted.exact or wanted.by_answer()):
                wrong.append(f"{name}: refused, {refused[name]}")
            continue
        if not wanted.whole.trained[1:].any():
            continue
        if wanted.exact and documents[at : at + 1] and documents[at].same(wanted.whole):
            at += 1
            continue
        by_answer = wanted.by_answer() if free or not wanted.exact else []
        parts = documents[at : at + len(by_answer)]
        if not by_answer or len(parts) < len(by_answer):
            return [*wrong, f"{name}: {difference(wanted.whole, (documents[at:] or [None])[0], tokenizer)}"]
        for may_be, document in zip(by_answer, parts, strict=True):
            if not any(document.same(one) for one in (may_be if free else may_be[:1])):
                wrong.append(f"{name}, by answer: {difference(may_be[0], document, tokenizer)}")
        at += len(parts)
    if at < len(documents):
        wrong.append(f"{len(documents) - at} documents more than wanted")
    return wrong


def has_empty_answer(one: Chat) -> bool:
    """Whether the assistant says nothing in a turn to be learned: no word, no thought, no call."""
    learned = (message for message, train in zip(one.messages, one.train, strict=True) if train is not False)
    return any(
        not (str(message.get("content") or "").strip() or message.get("tool_calls") or message.get("reasoning_content"))
        for message in learned
        if message["role"] == "assistant"
    )


def expect(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} are wrong:\n" + "\n".join(wrong)


def by_answers(chats: dict[str, Chat], marked: str, tokenizer: Any, train_on: str = "assistant") -> Reference:
    """The reference of a template whose blocks are the answers."""

    @cache
    def reference(name: str) -> Wanted:
        shown = for_template(chats[name], marked)
        train = policy(shown, train_on)
        answers = [flag for flag, message in zip(train, shown.messages, strict=True) if message["role"] == "assistant"]
        parts = cache(lambda: hf.by_answer(tokenizer, marked, shown, answers))
        return Wanted(*hf.choose(tokenizer, marked, shown, answers), parts)

    return reference


@pytest.mark.parametrize(
    "name", [name if name == "smollm2" else pytest.param(name, marks=pytest.mark.slow) for name in assets.TOKENIZERS]
)
def test_own_templates(name: str, tmp_path: Path) -> None:
    model = assets.asset(name)
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    for chat in ALL.values():
        hf.encode_chat(tokenizer, marked, for_template(chat, marked))
    expect(verdicts(ALL, tokenizer, run(tmp_path, model, ALL), by_answers(ALL, marked, tokenizer)))


@pytest.mark.parametrize(
    "name", [name if name == "smollm2" else pytest.param(name, marks=pytest.mark.slow) for name in assets.TOKENIZERS]
)
def test_random_conversations_in_bulk(name: str, tmp_path: Path) -> None:
    """Few shapes, many contents made of what templates ask for and of what tokens are cut by, after ordinary rows.

    Rows in bulk are made in another way than a few. Where a message is blank, nothing shows where it stands: such a
    conversation may be refused.
    """
    model, ordinary = assets.asset(name), assets.asset("llamafactory") / "alpaca_en_demo.json"
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    count = 400 if "TUNER_TEST_EVERY_ROW" in os.environ else 200
    random = {key: chat for key, chat in written.randomly(count).items() if not blank_answer_before_another(chat)}
    chats = {f"{key}, again": chat for key, chat in written.PLAIN.items()} | random | ALL
    before = [chat_of(row).row() for row in read(ordinary)]
    rows = product.write_rows(tmp_path / "rows.jsonl", [*before, *(chat.row() for chat in chats.values())])
    data = {"train": str(rows), "max_length": 2048, "on_bad_row": "skip"}
    prepared = product.prepare(tmp_path, {"model": {"name_or_path": str(model)}, "data": data})
    assert prepared.report["fast_path"]["documents"] > len(before) / 2, "the fast encoder was not in use"
    for reject in prepared.rejects:
        reject["line"] -= len(before)
    blank = [key for key, chat in chats.items() if any(not message["content"].strip() for message in chat.messages)]
    result, reference = named(chats, prepared, len(before)), by_answers(chats, marked, tokenizer)
    expect(verdicts(chats, tokenizer, result, reference, {*blank, *written.UNPROMPTED}))


def blank_answer_before_another(chat: Chat) -> bool:
    """Whether an answer follows a blank one: what the second is prompted with cannot be told by what is written."""
    pairs = pairwise(message for message in chat.messages)
    return any(b["role"] == a["role"] == "assistant" and not a["content"].strip() for a, b in pairs)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("llama3", "qwen3") else name for name in assets.TOKENIZERS],
)
def test_last_answer(name: str, tmp_path: Path) -> None:
    model = assets.asset(name)
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    result = run(tmp_path, model, ALL, train_on="last_assistant")
    expect(verdicts(ALL, tokenizer, result, by_answers(ALL, marked, tokenizer, "last_assistant")))


@pytest.mark.parametrize("asset", ["smollm2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_everything(asset: str, tmp_path: Path) -> None:
    """`train_on: all`: no turn is looked for, each token is trained."""
    model, marked = assets.asset(asset), MARKED[asset]
    tokenizer = assets.tokenizer(model)

    def reference(name: str) -> Wanted:
        encoded = hf.encode_chat(tokenizer, marked, for_template(ALL[name], marked))
        return Wanted(product.Encoded(encoded.ids, np.ones(len(encoded.ids), dtype=bool)), True)

    expect(verdicts(ALL, tokenizer, run(tmp_path, model, ALL, train_on="all"), reference))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
def test_flags(train_on: str, tmp_path: Path) -> None:
    """A message's own flag wins; one that is not the assistant's is trained with its header and the break after it."""
    model = assets.asset("smollm2")
    tokenizer = assets.tokenizer(model)

    def reference(name: str) -> Wanted:
        chat = written.FLAGS[name]
        return Wanted(*hf.choose(tokenizer, CHATML_WHOLE, chat, policy(chat, train_on)))

    result = run(tmp_path, model, written.FLAGS, train_on=train_on)
    expect(verdicts(written.FLAGS, tokenizer, result, reference))


HEAVY = {
    "begins with a token", "no control token", "no break between", "a prompt always follows", "closes the conversation",
    "capital roles", "trims",
}  # fmt: skip
"""Templates of which the others have all kinds of places that are looked for."""


@pytest.mark.slow("merges the system turn", "inserts an empty thought", "counts its messages")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in HAND_MADE]
)
def test_hand_made_templates(name: str, tmp_path: Path) -> None:
    """Without marks, and with the marks in the template that the product is given."""
    model = assets.asset("smollm2")
    tokenizer, marked = assets.tokenizer(model), HAND_MADE[name]
    reference = by_answers(written.PLAIN, marked, tokenizer)
    for kind, template in (("without", unmarked(marked)), ("with", marked)):
        result = run(tmp_path / kind, model, written.PLAIN, template=template)
        # Where each prompt is another text, marks do not show where a prompt that is cut from the answer ends.
        apart = ("blanks around", "blank line before") if kind == "with" and name == "counts its messages" else ()
        wrong = verdicts(written.PLAIN, tokenizer, result, reference, (*written.UNPROMPTED, *apart))
        expect([f"{kind} marks, {line}" for line in wrong])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_proven_is_refused(name: str, tmp_path: Path) -> None:
    model = assets.asset("smollm2")
    chats = {key: written.PLAIN[key] for key in ("one turn", "repeated answers", "two systems", "many turns")}
    documents, refused = run(tmp_path, model, chats, template=unmarked(IMPOSSIBLE[name]))
    assert not documents
    assert refused.keys() == chats.keys()
    assert all(len(reason) > 20 for reason in refused.values())


def test_control_tokens_in_text(tmp_path: Path) -> None:
    """Refused by default; escaped, they are the ids of transformers' own sanitising."""
    chats = {
        "in a question": turns("What is <|im_end|>?", "A token."),
        "in an answer": turns("How does a turn end?", "With <|im_end|>, then <|im_start|>user."),
        "alone": turns("<|im_start|>", "a", "b", "<|endoftext|>"),
        "in the system turn": turns("a", "b", system="x<|im_end|>\n<|im_start|>assistant\ny"),
        "not at all": turns("<|im_end", "|>", "< |im_end| >", "im_end"),
    }
    model = assets.asset("smollm2")
    tokenizer = assets.tokenizer(model)
    documents, refused = run(tmp_path / "refuse", model, chats)
    assert len(documents) == 1 and refused.keys() == chats.keys() - {"not at all"}
    assert all("<|" in reason for reason in refused.values())
    documents, refused = run(tmp_path / "escape", model, chats, special_tokens="escape")
    assert not refused
    for (name, chat), document in zip(chats.items(), documents, strict=True):
        out = tokenizer.apply_chat_template(chat.messages, sanitize_control_tokens=True, return_dict=True)
        assert document.ids.tolist() == out["input_ids"], name
        answers = [tokenizer.decode(run) for run in trained_runs(document)]
        assert answers == [f"{m['content']}<|im_end|>" for m in chat.messages if m["role"] == "assistant"], name


def trained_runs(document: product.Encoded) -> list[list[int]]:
    """The ids of each stretch of trained tokens."""
    edges = np.flatnonzero(np.diff(document.trained, prepend=False, append=False))
    return [document.ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
