"""Chat templates that write a conversation otherwise than its answers are prompted for, one for each kind that is met.

Each is a short one of its own that does what the named model's template does with plain messages and thoughts. The
file has those of other tests as well.
"""

import json
from pathlib import Path
from typing import Any

from tests.data import tiny
from tuner.data.encoding.tokenizer import TextTokenizer

TEMPLATES: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
THINKS = TEMPLATES["thinks"]
"""Qwen3.5, thinking: the prompt opens a thought, each answer writes one, and earlier turns drop it."""
THINKS_IF_ASKED = TEMPLATES["thinks_if_asked"]
"""Qwen3.5, not thinking: the prompt closes the thought unless its caller wants one."""
EMPTY_TAGS = TEMPLATES["empty_tags"]
"""Nemotron 3: the prompt opens a thought, and an answer without one begins with empty tags."""
CUTS = TEMPLATES["cuts"]
"""DeepSeek R1 and V3: the prompt opens a thought, and no answer is ever written with one; calls want null and text."""
CHANNELS = TEMPLATES["channels"]
"""gpt-oss: only the last answer has a thought and the token that ends a generation; thoughts before calls go later."""
PARTS = TEMPLATES["parts"]
"""SmolVLM: contents are lists of parts; of a string nothing is written."""

_SPECIAL = ("<|user|>", "<|assistant|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")


def tokenizer(template: str, **config: Any) -> TextTokenizer:
    """The tiny tokenizer with these templates' tokens; those of thoughts are ordinary ones, as the models have them."""
    config = {"eos_token": "<|return|>"} | config if template == CHANNELS else config
    return tiny.with_tokens(template, _SPECIAL, ("<think>", "</think>"), **config)
