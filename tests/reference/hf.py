"""What transformers makes of a conversation: ids and assistant masks of the marked template."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.formats import Chat
from tests.reference.product import Encoded


def encode_chat(tokenizer: Any, marked: str, chat: Chat) -> Encoded:
    """Ids and assistant mask by `apply_chat_template`; asserts that the marks change no text."""
    own = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
    text = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, chat_template=marked)
    assert text == own, "the marked template of the test renders another text"
    out = tokenizer.apply_chat_template(
        chat.messages,
        tools=chat.tools,
        chat_template=marked,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return Encoded(np.array(out["input_ids"], dtype=np.int64), np.array(out["assistant_masks"], dtype=bool))


def choose(tokenizer: Any, marked: str, chat: Chat, train: list[bool]) -> tuple[Encoded, bool]:
    """Ids, the mask of the answers with `train`, and whether each of those follows its prompt's own ids.

    `train` has one flag for each block of the marked template, in order.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, blocks = render_jinja_template(
        [chat.messages],
        tools=chat.tools,
        chat_template=marked,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    text = texts[0]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = np.array(encoding["input_ids"], dtype=np.int64), np.array(encoding["offset_mapping"])
    mask, exact = np.zeros(len(ids), dtype=bool), True
    for (start, stop), wanted in zip(blocks[0], train, strict=True):
        if wanted and stop > start:
            inside = (offsets[:, 1] > start) & (offsets[:, 0] < stop)
            prompt = tokenizer(text[:start], add_special_tokens=False)["input_ids"]
            whole = offsets[inside, 0].min() >= start and offsets[inside, 1].max() <= stop
            exact = bool(
                exact and whole and np.array_equal(prompt, ids[: len(prompt)]) and not inside[: len(prompt)].any()
            )
            mask |= inside
    return Encoded(ids, mask), exact


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """A plain document: the tokenizer's own ids and the end token, all trained."""
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], dtype=np.int64)
    return Encoded(ids, np.ones(len(ids), dtype=bool))


def encode_pair(tokenizer: Any, prompt: str, completion: str) -> Encoded:
    """A prompt and its completion, encoded together; one by one where a token would reach over the prompt's end.

    The completion and the end token are trained.
    """
    given = tokenizer(prompt)["input_ids"]
    together = tokenizer(prompt + completion)["input_ids"]
    ids = together if together[: len(given)] == given else given + tokenizer(completion)["input_ids"]
    ids = np.array([*ids, tokenizer.eos_token_id], dtype=np.int64)
    return Encoded(ids, np.arange(len(ids)) >= len(given))
