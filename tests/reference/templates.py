"""Chat templates with {% generation %} written in by hand around what the assistant writes.

A block begins where the generation prompt's text ends and stops after the end-of-turn token; white space that a
template puts after that token is outside. Without such a token, the blank line that ends the turn is inside. The three
in MARKED are otherwise the models' own: `hf.encode_chat` asserts that both render the same text. Those in HAND_MADE,
for SmolLM2's tokenizer, are of kinds that are met.
"""

import json
import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "marked"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


MARKED = {name: _read(name) for name in ("smollm2", "qwen3", "llama3")}
CHATML_WHOLE = _read("chatml_whole")
"""SmolLM2's with a block around each message: what it says for answers, all of it for the others."""

_OTHERS = json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))
HAND_MADE: dict[str, str] = _OTHERS["hand made"]
SENTENCEPIECE: dict[str, str] = _OTHERS["sentencepiece"]
"""For tokenizers of Llama 2's kind, whose words begin with a space."""
IMPOSSIBLE: dict[str, str] = _OTHERS["impossible"]
"""No answer of these stands where its prompt ends."""


def unmarked(template: str) -> str:
    """The template as a model would have it."""
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)
