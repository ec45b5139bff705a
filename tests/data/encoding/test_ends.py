"""The token that ends an assistant's turn, where others stand beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data import families, tiny
from tuner.data.encoding.encode import Encoder
from tuner.data.reading.records import parse_record

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ANSWER{% else %}OTHER{% endif %}"
)
CLOSED = TURNS + "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HEADER_ALWAYS = TURNS + "{% endfor %}{{ '<|im_start|>assistant\n' }}"


def closed(answer: str, other: str = "{{ m.content }}<|im_end|>", template: str = CLOSED) -> str:
    return template.replace("ANSWER", answer).replace("OTHER", other)


BOTH = "{{ m.content }}</answer><|im_end|>"
CASES = {
    # The end-of-turn token, as the tokenizer names it or not, comes after a token that closes the answer.
    "named": (closed(BOTH), "<|im_end|>", "</answer><|im_end|>"),
    "not named": (closed(BOTH), "<|endoftext|>", "</answer><|im_end|>"),
    "on its own line": (closed("{{ m.content }}</answer>\n<|im_end|>"), "<|endoftext|>", "</answer>\n<|im_end|>"),
    "of answers alone": (
        closed("{{ m.content }}</answer><|end|>", "{{ m.content }}"),
        "<|endoftext|>",
        "</answer><|end|>",
    ),
    # What comes next is a header, which is not the model's.
    "before a header": (closed("{{ m.content }}<|im_end|>", template=HEADER_ALWAYS), "<|endoftext|>", "<|im_end|>"),
    "closed before it": (closed(BOTH, template=HEADER_ALWAYS), "<|im_end|>", "</answer><|im_end|>"),
    "before a text's beginning": (
        closed("{{ m.content }}<|end|><|begin|>", "{{ m.content }}"),
        "<|endoftext|>",
        "<|end|>",
    ),
    "before what closes the whole": (
        closed("{{ m.content }}<|im_end|>") + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
        "<|endoftext|>",
        "<|im_end|>",
    ),
}


def test_the_last_answers_own_end_is_the_one_at_which_generation_stops() -> None:
    """Where more follows, gpt-oss writes another token, which also stands between its thoughts and the answer."""
    template = closed("{{ m.content }}{{ '<|end|>' if loop.last else '<|im_end|>' }}")
    tokenizer = tiny.with_tokens(template, ("<|end|>",), eos_token="<|end|>")
    assert [tokenizer.decode([i]) for i in tokenizer.eos_ids] == ["<|end|>"]


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_turn_is_trained_whatever_stands_before_it(name: str) -> None:
    template, eos, end = CASES[name]
    tokenizer = tiny.with_tokens(template, ("</answer>", "<|end|>", "<|begin|>"), eos_token=eos, bos_token="<|begin|>")
    batch = Encoder(tokenizer, "assistant").encode([parse_record(tiny.chat("a", "b", "c", "d"))])
    edges = np.flatnonzero(np.diff(batch.trained, prepend=False, append=False))
    spans = [batch.input_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert [tokenizer.decode(span) for span in spans] == [f"b{end}", f"d{end}"]
    assert spans[0][-1] in tokenizer.eos_ids
    assert batch.notes == {}


@pytest.mark.parametrize("name", [*CASES, "channels"])
def test_exports_stop_at_the_same_token(name: str, tmp_path: Path) -> None:
    """Generation stops where training has put the end of a turn, whatever the tokenizer's config names."""
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    from tuner.export.write import turn_ends

    ours = families.tokenizer(families.CHANNELS)
    if name in CASES:
        template, eos, _ = CASES[name]
        ours = tiny.with_tokens(template, ("</answer>", "<|end|>", "<|begin|>"), eos_token=eos, bos_token="<|begin|>")
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs.eos_token_id, *turn_ends(theirs)] == list(ours.eos_ids)


def test_a_marked_end_that_is_not_the_turns_is_said() -> None:
    marked = closed("{% generation %}{{ m.content }}</answer>{% endgeneration %}<|im_end|>")
    batch = Encoder(tiny.with_tokens(marked, ("</answer>",)), "assistant").encode([parse_record(tiny.chat("a", "b"))])
    assert batch.notes == {"end of turn not trained: the template marks it as not generated": 1}
