"""The written set: equal to the reference, or refused where the reference itself has no exact mask."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import assets, hf, product, written
from tests.reference.compare import difference
from tests.reference.formats import Chat, chat_of, for_template, read
from tests.reference.templates import CHATML_WHOLE, HAND_MADE, IMPOSSIBLE, MARKED, unmarked
from tests.reference.written import turns

Reference = Callable[[str], tuple[product.Encoded, bool]]
"""Ids and mask of a conversation by its name, and whether the mask is exact."""
Result = tuple[dict[str, product.Encoded], dict[str, str]]
"""Documents, and the reasons of the refused rows, by the conversations' names."""
ALL = {**written.PLAIN, **written.TOOLS, **written.UNPROMPTED}


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
    return named(chats, product.prepare_here(recipe), 1, train_on)


def named(chats: dict[str, Chat], prepared: product.Prepared, skip: int, train_on: str = "assistant") -> Result:
    """The documents after the first `skip`, and the refused rows of the last file, by the conversations' names."""
    names = list(chats)
    refused = {names[reject["line"] - 1]: reject["reason"] for reject in prepared.rejects}
    left = [name for name in names if name not in refused and any(policy(chats[name], train_on))]
    return dict(zip(left, prepared.documents[skip:], strict=True)), refused


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
    """What is wrong: a conversation equals its reference, or is refused because no mask of it is exact.

    Those in `may_refuse` may be refused all the same: never may a mask be another one.
    """
    documents, refused = result
    wrong = []
    for name in chats:
        wanted, exact = reference(name)
        if name in refused:
            if exact and name not in may_refuse:
                wrong.append(f"{name}: refused, {refused[name]}")
        elif not exact:
            wrong.append(f"{name}: has a mask where none is exact")
        elif wanted.trained[1:].any() != (name in documents):
            wrong.append(f"{name}: dropped" if name not in documents else f"{name}: not dropped")
        elif name in documents and not documents[name].same(wanted):
            wrong.append(f"{name}: {difference(wanted, documents[name], tokenizer)}")
    return wrong


def expect(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} are wrong:\n" + "\n".join(wrong)


def by_answers(chats: dict[str, Chat], marked: str, tokenizer: Any, train_on: str = "assistant") -> Reference:
    """The reference of a template whose blocks are the answers."""

    @cache
    def reference(name: str) -> tuple[product.Encoded, bool]:
        shown = for_template(chats[name], marked)
        train = policy(shown, train_on)
        answers = [flag for flag, message in zip(train, shown.messages, strict=True) if message["role"] == "assistant"]
        return hf.choose(tokenizer, marked, shown, answers)

    return reference


@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_own_templates(name: str, tmp_path: Path) -> None:
    model = assets.asset(name)
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    for chat in ALL.values():
        hf.encode_chat(tokenizer, marked, for_template(chat, marked))
    expect(verdicts(ALL, tokenizer, run(tmp_path, model, ALL), by_answers(ALL, marked, tokenizer)))


@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_random_conversations_in_bulk(name: str, tmp_path: Path) -> None:
    """Few shapes, many contents made of what templates ask for and of what tokens are cut by, after ordinary rows.

    Rows in bulk are made in another way than a few. Where a message is blank, nothing shows where it stands: such a
    conversation may be refused.
    """
    model, ordinary = assets.asset(name), assets.asset("llamafactory") / "alpaca_en_demo.json"
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    chats = {f"{key}, again": chat for key, chat in written.PLAIN.items()} | written.randomly(400) | ALL
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


@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_last_answer(name: str, tmp_path: Path) -> None:
    model = assets.asset(name)
    tokenizer, marked = assets.tokenizer(model), MARKED[name]
    result = run(tmp_path, model, ALL, train_on="last_assistant")
    expect(verdicts(ALL, tokenizer, result, by_answers(ALL, marked, tokenizer, "last_assistant")))


def test_everything(tmp_path: Path) -> None:
    """`train_on: all`: no turn is looked for, each token is trained."""
    model = assets.asset("qwen3")
    tokenizer = assets.tokenizer(model)

    def reference(name: str) -> tuple[product.Encoded, bool]:
        encoded = hf.encode_chat(tokenizer, MARKED["qwen3"], for_template(ALL[name], MARKED["qwen3"]))
        return product.Encoded(encoded.ids, np.ones(len(encoded.ids), dtype=bool)), True

    expect(verdicts(ALL, tokenizer, run(tmp_path, model, ALL, train_on="all"), reference))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
def test_flags(train_on: str, tmp_path: Path) -> None:
    """A message's own flag wins; one that is not the assistant's is trained with its header and the break after it."""
    model = assets.asset("smollm2")
    tokenizer = assets.tokenizer(model)

    def reference(name: str) -> tuple[product.Encoded, bool]:
        chat = written.FLAGS[name]
        return hf.choose(tokenizer, CHATML_WHOLE, chat, policy(chat, train_on))

    result = run(tmp_path, model, written.FLAGS, train_on=train_on)
    expect(verdicts(written.FLAGS, tokenizer, result, reference))


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_templates(name: str, tmp_path: Path) -> None:
    """Without marks, and with the marks in the template that the product is given."""
    model = assets.asset("smollm2")
    tokenizer, marked = assets.tokenizer(model), HAND_MADE[name]
    reference = by_answers(written.PLAIN, marked, tokenizer)
    for kind, template in (("without", unmarked(marked)), ("with", marked)):
        result = run(tmp_path / kind, model, written.PLAIN, template=template)
        expect([f"{kind} marks, {line}" for line in verdicts(written.PLAIN, tokenizer, result, reference)])


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
    assert documents.keys() == {"not at all"}
    assert all("<|" in reason for reason in refused.values())
    documents, refused = run(tmp_path / "escape", model, chats, special_tokens="escape")
    assert not refused
    for name, chat in chats.items():
        out = tokenizer.apply_chat_template(chat.messages, sanitize_control_tokens=True, return_dict=True)
        assert documents[name].ids.tolist() == out["input_ids"], name
        answers = [tokenizer.decode(run) for run in trained_runs(documents[name])]
        assert answers == [f"{m['content']}<|im_end|>" for m in chat.messages if m["role"] == "assistant"], name


def trained_runs(document: product.Encoded) -> list[list[int]]:
    """The ids of each stretch of trained tokens."""
    edges = np.flatnonzero(np.diff(document.trained, prepend=False, append=False))
    return [document.ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
