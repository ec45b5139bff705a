"""Chat templates with {% generation %} written in by hand around what the assistant writes.

A block begins where the generation prompt's text ends and stops after the end-of-turn token; white space that a
template puts after that token is outside. Otherwise each is the model's own template: `hf.encode_chat` asserts, on
every row, that both render the same text.
"""

from __future__ import annotations

from pathlib import Path

_MARKED = Path(__file__).parent / "marked"
MARKED = {name: (_MARKED / f"{name}.jinja").read_text(encoding="utf-8") for name in ("smollm2", "qwen3", "llama3")}
