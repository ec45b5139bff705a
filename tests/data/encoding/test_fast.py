"""The fast encoder is used only where it gives the tokenizer's own ids."""

import json
import random
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gigatoken import gigatoken_rs
from tokenizers import Tokenizer, normalizers

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.data.encoding import encode, fast, place
from tuner.data.encoding.encode import Encoder, FastEncoderMismatch
from tuner.data.encoding.fast import FastEncoder, ProvenEncoder
from tuner.data.encoding.tokenizer import TextTokenizer, Unproven
from tuner.data.reading.examples import Conversation, Example, PlainText, PromptCompletion
from tuner.data.reading.records import parse_record


class Liar:
    """An encoder that is right but for one word, which it spells backwards."""

    def __init__(self, word: str, true: Any) -> None:
        self._word = word
        self._true = true

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        letters = [self._true.encode(letter) for letter in self._word]
        backwards = np.concatenate(letters)[::-1]
        parts = [self._true.encode(part) for part in text.split(self._word)]
        mixed = [piece for part in parts for piece in (part, backwards)][:-1]
        return np.concatenate(mixed)


def lie(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    load = gigatoken_rs.load_hf_json
    monkeypatch.setattr(gigatoken_rs, "load_hf_json", lambda json_text: Liar(word, load(json_text)))


def changed(**changes: Any) -> TextTokenizer:
    spec = json.loads(tiny.tokenizer_json())
    for path, value in changes.items():
        *parents, key = path.split("__")
        place = spec
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[key] = value
    return TextTokenizer({**tiny.files(), "tokenizer.json": json.dumps(spec).encode()})


def without_byte(symbol: str) -> TextTokenizer:
    spec = json.loads(tiny.tokenizer_json())
    spec["model"]["vocab"].pop(symbol)
    spec["model"]["merges"] = [merge for merge in spec["model"]["merges"] if symbol not in "".join(merge)]
    kept = {"".join(merge) for merge in spec["model"]["merges"]}
    vocabulary = spec["model"]["vocab"]
    spec["model"]["vocab"] = {k: v for k, v in vocabulary.items() if len(k) == 1 or k in kept or v < 3}
    return TextTokenizer({**tiny.files(), "tokenizer.json": json.dumps(spec).encode()})


@pytest.mark.parametrize(("changes", "reason"), cases(__file__, "other_kinds_of_tokenizers_are_told_apart"))
def test_other_kinds_of_tokenizers_are_told_apart(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unproven, match=reason):
        _ = changed(**changes).byte_table


def test_bytes_of_tokens() -> None:
    tokenizer = tiny.tokenizer()
    table = tokenizer.byte_table
    for text in ("hello \u00e9\u4e2d\U0001f600\n\x00", "a<|im_end|>b"):
        assert table.lengths[tokenizer.encode(text)].sum() == len(text.encode())


def proven(tokenizer: TextTokenizer) -> ProvenEncoder:
    table = tokenizer.byte_table
    return ProvenEncoder(FastEncoder(tokenizer, table), tokenizer, table)


def test_an_encoder_that_errs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    proven(tiny.tokenizer())
    lie(monkeypatch, "S1!")
    with pytest.raises(Unproven, match="other ids"):
        proven(tiny.tokenizer())


def test_a_tokenizer_that_cannot_be_read_is_not_taken() -> None:
    own = json.loads(tiny.tokenizer_json())["pre_tokenizer"]
    tokenizer = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}, own]})
    with pytest.raises(Unproven, match="cannot read"):
        FastEncoder(tokenizer, tokenizer.byte_table)


def test_characters_are_looked_at_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, "\u03b1")
    encoder = proven(tiny.tokenizer())
    assert encoder.refuted(["abc", "\u00e9t\u00e9"]) == set()
    assert encoder.refuted(["\u03b1\u03b2"]) == {"\u03b1"}
    assert encoder.refuted(["abc"]) == set()
    assert encoder.refuted(["\u00e9\u03b1"]) == {"\u03b1"}


def rows(count: int) -> list[Example]:
    texts = [f"say {i} {'word' * (i % 7)}\n" for i in range(count)]
    chats = [parse_record(tiny.chat(text, f"answer {text}")) for text in texts]
    texts_alone: list[Example] = [PlainText(text) for text in texts[:20]]
    return [*chats, *texts_alone, *(PromptCompletion(text, f" yes {i}") for i, text in enumerate(texts[:20]))]


@pytest.fixture
def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "FAST_FROM_BYTES", 1)


def same(tokenizer: TextTokenizer, examples: list[Example]) -> encode.EncodedBatch:
    """Encode in both ways, and return what the fast one gave when they are equal."""
    batch = Encoder(tokenizer, "assistant").encode(examples)
    alone = Encoder(tokenizer, "assistant", fast=False).encode(examples)
    for name in ("input_ids", "trained", "offsets", "prompt_tokens", "records"):
        assert np.array_equal(getattr(batch, name), getattr(alone, name)), name
    assert {i: p.reason for i, p in batch.problems.items()} == {i: p.reason for i, p in alone.problems.items()}
    assert alone.fast == 0
    return batch


@pytest.mark.usefixtures("always_fast")
def test_both_ways_give_the_same_documents() -> None:
    examples = rows(300)
    batch = same(tiny.tokenizer(), examples)
    assert batch.fast == len(examples)


@pytest.mark.usefixtures("always_fast")
def test_rows_that_the_fast_way_cannot_take_are_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, "\u03b1")
    odd = [
        parse_record(tiny.chat("a", "\u03b1\u03b2")), parse_record(tiny.chat("<|im_end|>", "b")),
        PlainText("x <|im_end|>"),
    ]
    batch = same(tiny.tokenizer(), [*rows(10), *odd, *rows(10)])
    assert len(batch.problems) == 2 and all("control token" in p.reason for p in batch.problems.values())
    assert batch.fast == len(batch.records) - 1


@pytest.mark.usefixtures("always_fast")
def test_bytes_that_the_tokenizer_does_not_know() -> None:
    tokenizer = without_byte("q")
    examples = [parse_record(tiny.chat("a", "quite")), *rows(3), PlainText("aqua"), PlainText("q")]
    batch = same(tokenizer, examples)
    assert tokenizer.decode(batch.input_ids[: int(batch.offsets[1])].tolist()).endswith("uite<|im_end|>\n")
    assert batch.fast == len(examples) - 3


@pytest.mark.usefixtures("always_fast")
def test_a_normal_form_is_the_tokenizers_own_matter() -> None:
    backend = Tokenizer.from_str(tiny.tokenizer_json())
    backend.normalizer = normalizers.NFC()
    tokenizer = TextTokenizer({**tiny.files(), "tokenizer.json": backend.to_str().encode()})
    batch = same(tokenizer, [parse_record(tiny.chat("e\u0301t\u00e9", "cafe\u0301")), *rows(5)])
    assert batch.fast == len(batch.records) - 1
    assert "caf\u00e9" in tokenizer.decode(batch.input_ids[: int(batch.offsets[1])].tolist())


@pytest.mark.usefixtures("always_fast")
def test_a_sample_that_differs_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, "say 68 ")
    with pytest.raises(FastEncoderMismatch):
        Encoder(tiny.tokenizer(), "assistant").encode(rows(300))


def test_small_batches_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gigatoken_rs, "load_hf_json", lambda _: pytest.fail("it was built"))
    assert Encoder(tiny.tokenizer(), "assistant").encode(rows(10)).fast == 0


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gigatoken", "gigatoken.gigatoken_rs"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("always_fast", "no_library")
def test_without_the_library_words_are_remembered() -> None:
    assert Encoder(tiny.tokenizer(), "assistant").encode(rows(10)).fast == 0
    with pytest.raises(Unproven, match="not installed"):
        FastEncoder(tiny.tokenizer(), tiny.tokenizer().byte_table)
    odd = [parse_record(tiny.chat("a\u0301 \u4e2d\n\n", "<|im_end|>")), PlainText("  x  \r\n\t <|im_ end|>")]
    assert same(tiny.tokenizer(), [*rows(300), *odd, *rows(5)]).fast == 0
    same(without_byte("q"), [parse_record(tiny.chat("a", "quite")), *rows(3), PlainText("aqua"), PlainText("q")])


@pytest.mark.usefixtures("always_fast", "no_library")
def test_words_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_MAX_WORDS", 40)
    tokenizer = tiny.tokenizer()
    encoder = fast.WordEncoder(tokenizer, tokenizer.byte_table)
    for start in range(0, 600, 20):
        text = " ".join(f"w{i}" for i in range(start, start + 30)) + "<|im_end|>"
        assert encoder.encode(text).tolist() == tokenizer.encode(text)
    assert len(encoder._index) <= 40 + 35


@pytest.mark.parametrize("cut", cases(__file__, "words_are_cut_as_the_tokenizer_cuts_them"))
def test_words_are_cut_as_the_tokenizer_cuts_them(cut: dict[str, Any]) -> None:
    bare = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [cut, bare]})
    table = tokenizer.byte_table
    encoder = ProvenEncoder(fast.WordEncoder(tokenizer, table), tokenizer, table)
    for text in ("hello 1234 the answer", "x\n\n 12 a", "", "say 1 word\n"):
        assert encoder.encode(text).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize(("cut", "reason"), cases(__file__, "words_that_are_cut_otherwise_are_not_remembered"))
def test_words_that_are_cut_otherwise_are_not_remembered(cut: dict[str, Any], reason: str) -> None:
    bare = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [cut, bare]})
    with pytest.raises(Unproven, match=reason):
        fast.WordEncoder(tokenizer, tokenizer.byte_table)


@pytest.mark.parametrize("readable", [False, True])
def test_memory_is_given_back_by_building_anew(monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    tokenizer = tiny.tokenizer()
    encoder = FastEncoder(tokenizer, tokenizer.byte_table)
    built = []
    monkeypatch.setattr(encoder, "_load", lambda json_text: built.append(1) or gigatoken_rs.load_hf_json(json_text))
    sizes, held = iter(range(1 << 20)), iter(range(300, 1 << 20, 300))
    monkeypatch.setattr(encoder, "_before", 0)
    monkeypatch.setattr(encoder, "_resident", -1)
    monkeypatch.setattr(fast, "resident_bytes", lambda: next(sizes) if readable else None)
    monkeypatch.setattr(fast, "allocated_bytes", lambda: next(held) if readable else None)
    limits = {"_CACHE_TEXT": 1000, "_CACHE_BYTES": 900, "_LOOK_BYTES": 1, "_MEASURED_CHARS": 100}
    for name, value in limits.items():
        monkeypatch.setattr(fast, name, value)
    expected = tokenizer.encode("hello world" * 10)
    for _ in range(28):
        assert encoder.encode("hello world" * 10).tolist() == expected
    # Every second call the process has grown by two bytes, and what is held by 300; or 110 characters a call.
    assert len(built) == (3 if readable else 2)
    for _ in range(28):
        encoder.encode("hello world")
    assert len(built) == (3 if readable else 2)


def test_conversations_with_other_keys_are_rendered() -> None:
    row = tiny.chat("a", "b")
    row["messages"][0]["name"] = "ann"
    example = parse_record(row)
    assert isinstance(example, Conversation)
    same(tiny.tokenizer(), [example, *rows(3)])


PIECES = ("a", "word", " the", " ", "\n", "\u00e9", "\u65e5\u672c", "\U0001f600", "1", "23", "'s", "  ", "<|im_end|>")


def test_a_long_text_has_the_tokenizers_own_characters_in_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    tokenizer = tiny.tokenizer()
    encoder = Encoder(tokenizer, "assistant")
    encoder.choose()
    for _ in range(50):
        text = "".join(rng.choices(PIECES, k=60))
        [own] = tokenizer.encode_batch([text])
        found = encoder._long(text)  # noqa: SLF001 - its two callers need long texts
        assert found is not None
        for of in ("ids", "starts", "stops"):
            assert np.array_equal(getattr(found, of), getattr(own, of)), (text, of)
    rows = [PromptCompletion("the ", "answer" + "".join(rng.choices(PIECES[:-1], k=30))) for _ in range(20)]
    plain = [Encoder(tokenizer, "assistant", fast=False).explain(row).documents[0] for row in rows]
    assert sum(document.apart for document in plain) > 5
    monkeypatch.setattr(place, "LONG_CHARS", 1)
    monkeypatch.setattr(place, "_READ_TOKENS", 2)
    spans = []
    monkeypatch.setattr(TextTokenizer, "encode_batch", lambda *_: spans.append(1))
    for row, document in zip(rows, plain, strict=True):
        [long] = encoder.explain(row).documents
        assert np.array_equal(long.input_ids, document.input_ids)
        assert np.array_equal(long.trained, document.trained)
        assert (long.prompt_tokens, long.spans, long.apart) == (document.prompt_tokens, document.spans, document.apart)
    assert not spans
