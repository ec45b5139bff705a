"""A small run of the campaign over tokenizers: its chats and families, without training and exporting."""

from pathlib import Path

import pytest

from tests.reference import assets
from tools import tokenizer_campaign
from tools.derived_masks import Derivation, Document
from tools.tokenizer_families import FAMILIES, write_family
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.data.reading.records import parse_record


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TinyLlama, rewritten", "small BPE"])
def test_ids_of_a_family(name: str, tmp_path: Path) -> None:
    (family,) = [family for family in FAMILIES if family.name == name]
    here = assets.asset("llama2").parent
    rows = tokenizer_campaign.chats(here, 60)
    write_family(family, here, tmp_path / "model", lambda: [m["content"] for chat in rows for m in chat])
    theirs = assets.tokenizer(tmp_path / "model")
    ours = load_tokenizer(str(tmp_path / "model"), None, TokenizerSection())
    assert len(rows) == 60
    batch = Encoder(ours, "assistant").encode([parse_record({"messages": chat}) for chat in rows])
    bounds = zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False)
    documents = [Document(batch.input_ids[a:b].tolist(), batch.trained[a:b].tolist()) for a, b in bounds]
    derivation, at = Derivation(theirs, "</s>"), 0
    for number, chat in enumerate(rows):
        assert ours.encode(ours.render(chat)) == theirs.apply_chat_template(chat, return_dict=False)
        if number not in batch.problems:
            found = derivation.matched(chat, documents, at)
            assert found is not None and found[1] == len(batch.by_answer.get(number, ()))
            at += found[0]
    assert at == len(documents)
    shifted = [Document(one.ids, [*one.trained[1:], False]) for one in documents]
    assert derivation.matched(rows[0], shifted, 0) is None


def test_families_are_of_every_kind_and_form() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 30
    kinds = {"byte-level BPE", "byte-level BPE (tiktoken)", "SentencePiece BPE", "SentencePiece Unigram", "WordPiece"}
    assert {family.kind for family in FAMILIES} == kinds
    assert {"tokenizer.json", "tokenizer.model"} <= {f.form for f in FAMILIES if f.kind == "SentencePiece BPE"}
