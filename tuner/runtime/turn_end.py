"""Which token ends an assistant's turn, read off exchanges that a chat template writes; for data and for exports."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

_QUESTION, _ANSWER, _NEXT = "the question", "the answer", "and then"
_EXCHANGE: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
)


class ChatConvention(NamedTuple):
    """How a tokenizer writes messages and finds control tokens, and what it knows of them."""

    render: Callable[[Sequence[Mapping[str, Any]], bool], str | None]
    """Messages to text, with the generation prompt or without; None where the template refuses them."""
    specials: Callable[[str], list[tuple[int, int]]]
    """The characters [start, stop) of every control token in a text."""
    ends: Collection[str]
    """Tokens at which generation stops, by the tokenizer and the model."""
    begin: str | None
    """The token that begins a text."""


def turn_end(exchange: ChatConvention) -> str | None:
    """Return the token that ends an answer where none of `exchange.ends` does; None where one does, or none is there.

    Other control tokens may stand before it (`</answer><|im_end|>`), and the next turn's header right after it. It is
    the one before that header which ends the user's turn too, else the last one before it.
    """
    if (text := exchange.render(_EXCHANGE[:2], False)) is None:
        return None
    last = run = _run_after(exchange, text, _ANSWER)
    longer = exchange.render(_EXCHANGE, False)
    if longer is not None:  # what closes the whole conversation is not there once more follows
        run = _run_after(exchange, longer, _ANSWER) or last
    if not run or any(token in exchange.ends for token in run):
        return None
    openers = {*_prompt_tokens(exchange), exchange.begin}
    before = next((i for i, token in enumerate(run) if token in openers), len(run))
    run = run[: max(before, 1)]
    of_user = _run_after(exchange, text, _QUESTION)[:1]
    end = of_user[0] if of_user and of_user[0] in run else run[-1]
    # A template may end the last answer with another token, at which generation stops, than those that more follows.
    return None if end not in last and any(token in exchange.ends for token in last) else end


def _run_after(exchange: ChatConvention, text: str, words: str) -> list[str]:
    """The control tokens after `words` with nothing but white space between them, whatever stands before the first."""
    if (start := text.find(words)) < 0:
        return []
    run: list[str] = []
    last = start
    for begin, stop in exchange.specials(text):
        if begin < start:
            continue
        if run and text[last:begin].strip():
            break
        run.append(text[begin:stop])
        last = stop
    return run


def _prompt_tokens(exchange: ChatConvention) -> list[str]:
    """The control tokens of the generation prompt."""
    before, prompt = (exchange.render(_EXCHANGE[:1], wanted) for wanted in (False, True))
    if before is None or prompt is None or not prompt.startswith(before):
        return []
    added = prompt[len(before) :]
    return [added[begin:stop] for begin, stop in exchange.specials(added)]
