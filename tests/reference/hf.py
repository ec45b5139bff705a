"""What transformers makes of a conversation: ids and assistant masks of the marked template."""

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


CALLERS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""What callers may say of thoughts."""


def by_answer(tokenizer: Any, marked: str, chat: Chat, train: list[bool]) -> list[list[Encoded]]:
    """For each answer with `train` what it may be at inference: what is after the plain prompt first, where it is.

    An answer is left out where a token reaches over its end whoever calls.
    """
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    chosen = [i for i, wanted in zip(answers, train, strict=True) if wanted and i > 0]
    found = [[_answer(tokenizer, marked, chat, i, variables) for variables in CALLERS] for i in chosen]
    return [each for each in ([one for one in several if one is not None] for several in found) if each]


def _answer(tokenizer: Any, marked: str, chat: Chat, i: int, variables: dict[str, Any]) -> Encoded | None:
    """The prompt's own ids and those of message i after it, as one encoding where that has the prompt's ids."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(messages: list[Any], prompt: bool) -> Any:
        texts, blocks = render_jinja_template(
            [messages],
            tools=chat.tools,
            chat_template=marked,
            return_assistant_tokens_mask=True,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
            **variables,
        )
        return texts[0], blocks[0]

    prompt = rendered(chat.messages[:i], True)[0]
    text, blocks = rendered(chat.messages[: i + 1], False)
    start, stop = blocks[-1]
    if not text.startswith(prompt):
        # With an answer after it the template writes the prompt otherwise; the prompt may hold the answer's beginning.
        shared = max(k for k in range(stop - start + 1) if prompt.endswith(text[start : start + k])) if variables else 0
        if variables and not shared:
            return None
        text, stop = prompt + text[start + shared :], stop - start - shared + len(prompt)
    given = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(whole["offset_mapping"])
    ids, last = whole["input_ids"], int((offsets[:, 0] < stop).sum())
    inside = offsets[len(given) :, 0].min(initial=len(text)) >= len(prompt)
    before = offsets[: len(given), 1].max() <= len(prompt)
    if ids[: len(given)] != given or not (inside and before) or offsets[last - 1, 1] > stop:
        rest = tokenizer(text[len(prompt) :], add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(rest["offset_mapping"])
        last = int((offsets[:, 0] < stop - len(prompt)).sum())
        if last == 0 or offsets[last - 1, 1] > stop - len(prompt):
            return None
        ids, last = [*given, *rest["input_ids"]], last + len(given)
        if tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) != text:
            return None  # encoded by itself the answer begins with a space, as SentencePiece has every text
    at = np.arange(len(ids))
    return Encoded(np.array(ids, dtype=np.int64), (at >= len(given)) & (at < last))


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
