"""The token that ends an assistant's turn, where others stand beside it."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data import families, tiny
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.records import parse_record

CASES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("ends.json").read_text(encoding="utf-8"))
"""Templates with other tokens beside the one that ends a turn, the tokenizer's own end, and how an answer ends.

The end-of-turn token, as the tokenizer names it or not, may come after a token that closes the answer. What comes next
is a header, which is not the model's.
"""
CLOSED = families.TEMPLATES["closed"]


def ending(name: str) -> TextTokenizer:
    case = CASES[name]
    specials = ("</answer>", "<|end|>", "<|begin|>")
    return tiny.with_tokens(case["template"], specials, eos_token=case["eos"], bos_token="<|begin|>")


def test_the_last_answers_own_end_is_the_one_at_which_generation_stops() -> None:
    """Where more follows, gpt-oss writes another token, which also stands between its thoughts and the answer."""
    template = CLOSED.replace("ANSWER", "{{ m.content }}{{ '<|end|>' if loop.last else '<|im_end|>' }}")
    tokenizer = tiny.with_tokens(template, ("<|end|>",), eos_token="<|end|>")
    assert [tokenizer.decode([i]) for i in tokenizer.eos_ids] == ["<|end|>"]


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_turn_is_trained_whatever_stands_before_it(name: str) -> None:
    tokenizer, end = ending(name), CASES[name]["end"]
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

    ours = ending(name) if name in CASES else families.tokenizer(families.CHANNELS)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs.eos_token_id, *turn_ends(theirs)] == list(ours.eos_ids)


def test_a_marked_end_that_is_not_the_turns_is_said() -> None:
    marked = CLOSED.replace("ANSWER", "{% generation %}{{ m.content }}</answer>{% endgeneration %}<|im_end|>")
    batch = Encoder(tiny.with_tokens(marked, ("</answer>",)), "assistant").encode([parse_record(tiny.chat("a", "b"))])
    assert batch.notes == {"end of turn not trained: the template marks it as not generated": 1}
