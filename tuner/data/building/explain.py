"""What is trained, token by token: for people who want to see it before they train."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from tuner.config.duration import Duration
from tuner.data.building.documents import bad_record_error
from tuner.data.building.encoded import bad_record
from tuner.data.building.pack import pair_limit
from tuner.data.building.spec import PrepareSpec, files_of
from tuner.data.encoding.compared import AnyEncoder
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import Document
from tuner.data.reading.blocks import blocks, examples_of, lines_in
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import Compared, Example, Labelled, Pair
from tuner.data.sources import SourceFile

Fate = Literal["whole", "truncate", "split", "drop"]


@dataclass(frozen=True)
class TokenView:
    """One token of an explained record."""

    text: str
    id: int
    trained: bool
    rule: str
    """Which part of the record it belongs to, such as `assistant turn` or `prompt`."""
    kept: bool = True
    """Whether a row holds it: not where the document is dropped for its length, nor beyond where it is cut."""


@dataclass(frozen=True)
class DocumentView:
    """One document of a record and all its tokens, with what its length costs it."""

    name: str
    """The file's, as it was given."""
    line: int
    tokens: list[TokenView]
    document: int = 0
    """Its number in the record, from 0."""
    documents: int = 1
    """How many the record has: several where each answer of a chat is one."""
    left_out: tuple[str, ...] = ()
    """The reasons of the record's answers that have no document."""
    fate: Fate = "whole"
    """What becomes of it as `data.too_long` says."""
    max_length: int = 0
    """Tokens of a row."""
    answer: str = ""
    """Which answer it is, where answers are compared: chosen, rejected, wanted or not wanted."""
    drawn: str = ""
    """Why it may not be trained on though it is read: its source's share, or what is held out."""

    @property
    def before(self) -> int:
        """Tokens before the first that rows hold: of the prompt of a pair the last ones may be kept."""
        return next((number for number, token in enumerate(self.tokens) if token.kept), 0)

    @property
    def kept(self) -> list[TokenView]:
        """The tokens that rows hold."""
        return [token for token in self.tokens if token.kept]


def explain(spec: PrepareSpec, n: int) -> Iterator[DocumentView]:
    """Yield the documents of the first `n` training records that can be used.

    With `on_bad_row: error` a bad record is a DataError.
    """
    return (view for views in islice(_views(spec), n) for view in views)


def _views(spec: PrepareSpec) -> Iterator[list[DocumentView]]:
    alone = Encoder(spec.tokenizer, spec.examples.train_on, spec.special_tokens_in_text)
    encoder = AnyEncoder(alone, spec.examples.kind)
    for file in files_of(spec, spec.data.train):
        before, drawn = 0, _drawn(spec, file)
        for block in blocks(file):
            for record, example in examples_of(block, spec.examples.kind):
                try:
                    if isinstance(example, RecordProblem):
                        raise example
                    placed = encoder.explain(example)
                except RecordProblem as problem:
                    if spec.data.on_bad_row == "skip":
                        continue
                    value = record.value if isinstance(example, RecordProblem) else None
                    bad = bad_record(record, problem, value)
                    has_template = spec.tokenizer.has_template
                    raise bad_record_error(file, bad, before, has_template, spec.examples.kind) from problem
                fates = _fates(spec, placed.documents)
                yield [
                    DocumentView(
                        file.name, before + record.line, _tokens(spec, document, fate, kept), i, len(placed.documents),
                        placed.left_out, fate, spec.max_length, _answer(example, i), drawn,
                    )
                    for i, (document, (fate, kept)) in enumerate(zip(placed.documents, fates, strict=True))
                ]
            before += lines_in(block)


def _drawn(spec: PrepareSpec, file: SourceFile) -> str:
    """Why a document of a file may not be among those that are trained: which are is known of all of them alone."""
    share = f"weight: {file.weight:g}" if file.weight < 1 else f"count: {file.count}" if file.count is not None else ""
    held = f"data.eval: {spec.data.eval}" if isinstance(spec.data.eval, Duration) else ""
    ways = [f"{share} may not draw it"] if share else []
    return " and ".join([*ways, f"{held} may hold it out"] if held else ways)


def _answer(example: Example | Compared, number: int) -> str:
    if isinstance(example, Pair):
        return ("chosen", "rejected")[number]
    return ("wanted" if example.label else "not wanted") if isinstance(example, Labelled) else ""


def _fates(spec: PrepareSpec, documents: list[Document]) -> list[tuple[Fate, range]]:
    """What becomes of each document of a record, and which of its tokens rows hold."""
    limit, starts = spec.max_length, [0] * len(documents)
    if spec.examples.documents == 2 and spec.data.max_prompt_length is not None:
        prompts = [int(np.argmax(document.trained)) for document in documents]
        starts = [max(0, prompt - spec.data.max_prompt_length) for prompt in prompts]
    lengths = [len(document.input_ids) - start for document, start in zip(documents, starts, strict=True)]
    if spec.examples.documents == 2:  # both stand in one row
        if sum(lengths) > spec.max_length and spec.too_long == "drop":
            return [("drop", range(0))] * 2
        limit = int(pair_limit(spec.max_length, np.array(min(lengths))))
    fates: list[Fate] = ["whole" if length <= limit else spec.too_long for length in lengths]
    by_fate = {"drop": 0, "truncate": limit}
    shortest = spec.data.min_piece_length or 0
    whole = [length - (length % limit if 0 < length % limit < shortest < length else 0) for length in lengths]
    kept = [by_fate.get(fate, length) for fate, length in zip(fates, whole, strict=True)]
    return [(fate, range(start, start + n)) for fate, start, n in zip(fates, starts, kept, strict=True)]


def _tokens(spec: PrepareSpec, document: Document, fate: Fate, kept: range) -> list[TokenView]:
    rules = [""] * len(document.input_ids)
    for span in document.spans:
        rules[span.start : span.stop] = [span.rule] * (span.stop - span.start)
    # The first token of a document, or of a piece of a split one, is predicted from nothing: it is never a target.
    piece = spec.max_length if fate == "split" else len(rules)
    return [
        TokenView(spec.tokenizer.decode([int(token)]), int(token), bool(trained) and i % piece > 0, rule, i in kept)
        for i, (token, trained, rule) in enumerate(zip(document.input_ids, document.trained, rules, strict=True))
    ]
