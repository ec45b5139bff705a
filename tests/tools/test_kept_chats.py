"""The tool that compares the documents of answers with transformers' prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import families, tiny
from tools import kept_chats
from tuner.data.encoding.encode import Encoder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat("a", "b", "c", "d"), tiny.chat("e", "f")])
    families.tokenizer(families.CHANNELS).save(tmp_path / "model")
    (tmp_path / "channels.jinja").write_text(families.CHANNELS)
    return [str(rows), f"{tmp_path / 'model'}={tmp_path / 'channels.jinja'}"]


def test_what_is_kept_is_counted_and_compared(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kept_chats.main(arguments) == 0
    assert "kept 2 of 2 rows, 3 documents, 1 rows by answer" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["a token earlier", "without the end", "another answer"])
def test_a_wrong_mask_is_seen(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Encoder.encode

    def faulty(self: Encoder, examples: Any, *more: Any) -> Any:
        batch = whole(self, examples, *more)
        trained = batch.trained.copy()
        first = int(np.argmax(trained))
        if fault == "a token earlier":
            trained[first - 1] = True
        elif fault == "without the end":
            trained[int(batch.offsets[1]) - 1] = False
        else:
            trained = np.roll(trained, 3)
        return replace(batch, trained=trained)

    monkeypatch.setattr(Encoder, "encode", faulty)
    assert kept_chats.main(arguments) == 1
    assert "WRONG: row 1, message 1" in capsys.readouterr().out
