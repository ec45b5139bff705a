"""The families of the campaign over tokenizers."""

from tools.tokenizer_families import FAMILIES


def test_families_are_of_every_kind_and_form() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 30
    kinds = {"byte-level BPE", "byte-level BPE (tiktoken)", "SentencePiece BPE", "SentencePiece Unigram", "WordPiece"}
    assert {family.kind for family in FAMILIES} == kinds
    assert {"tokenizer.json", "tokenizer.model"} <= {f.form for f in FAMILIES if f.kind == "SentencePiece BPE"}
