"""SentencePiece tokenizers as transformers loads them: ids and masks of conversations, equal to the reference."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.reference import assets, written
from tests.reference.formats import Chat
from tests.reference.templates import SENTENCEPIECE, unmarked
from tests.reference.test_written import by_answers, expect, run, verdicts

SETTINGS: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "llama", "legacy": True},
    "TinyLlama": {"model_type": "llama", "legacy": False},
    "Mistral 7B": {"model_type": "mistral", "legacy": True},
}


def in_turns(chats: dict[str, Chat]) -> dict[str, Chat]:
    """Those of a user and an assistant, in turns, without reasoning: what the templates take."""
    return {
        name: chat
        for name, chat in chats.items()
        if all(message["role"] == ("user", "assistant")[i % 2] for i, message in enumerate(chat.messages))
        and not any("reasoning_content" in message for message in chat.messages)
    }


PAIRS = [
    ("Llama 2", "inst"),
    ("Mistral 7B", "inst without spaces"),
    ("TinyLlama", "turns"),
    ("Llama 2", "spaces and two tokens"),
]


@pytest.mark.parametrize(
    ("name", "template"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS[1:])]
)
def test_sentencepiece(name: str, template: str, tmp_path: Path) -> None:
    model, settings, marked = tmp_path / "model", SETTINGS[name], SENTENCEPIECE[template]
    shutil.copytree(assets.asset("llama2"), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"legacy": settings["legacy"], "chat_template": unmarked(marked)}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "config.json").write_text(json.dumps({"model_type": settings["model_type"]}))
    chats = in_turns({**written.PLAIN, **written.randomly(40, seed=7)})
    tokenizer = assets.tokenizer(model)
    expect(verdicts(chats, tokenizer, run(tmp_path, model, chats), by_answers(chats, marked, tokenizer)))
