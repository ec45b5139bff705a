"""A small run of the campaign over tokenizers: its chats and families, without training and exporting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import assets
from tools import tokenizer_campaign
from tools.tokenizer_families import FAMILIES, write_family
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer


@pytest.mark.parametrize("name", ["TinyLlama, rewritten", "small BPE"])
def test_ids_of_a_family(name: str, tmp_path: Path) -> None:
    (family,) = [family for family in FAMILIES if family.name == name]
    here = assets.asset("llama2").parent
    rows = tokenizer_campaign.chats(here, 60)
    write_family(family, here, tmp_path / "model", lambda: [m["content"] for chat in rows for m in chat])
    theirs = assets.tokenizer(tmp_path / "model")
    ours = load_tokenizer(str(tmp_path / "model"), None, TokenizerSection())
    assert len(rows) == 60
    for chat in rows:
        assert ours.encode(ours.render(chat)) == theirs.apply_chat_template(chat, return_dict=False)


def test_families_are_of_every_kind_and_form() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 30
    assert {family.kind for family in FAMILIES} == {"byte-level BPE", "SentencePiece BPE", "SentencePiece Unigram"}
    assert {"tokenizer.json", "tokenizer.model"} <= {f.form for f in FAMILIES if f.kind == "SentencePiece BPE"}
