"""Chat templates that write a conversation otherwise than its answers are prompted for, one for each kind that is met.

Each is a short one of its own that does what the named model's template does with plain messages and thoughts.
"""

from __future__ import annotations

from typing import Any

from tests.data import tiny
from tuner.data.encoding.tokenizer import TextTokenizer

_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% set thought = m.reasoning_content or '' %}{% set words = m.content %}"
    "{% if '</think>' in words %}{% set thought = words.split('</think>')[0].split('<think>')[-1] %}"
    "{% set words = words.split('</think>')[-1] %}{% endif %}"
)
_CHATML = (
    _LAST_QUESTION + "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}NEW{% else %}OLD{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}PROMPT{% endif %}"
)
_WITH_THOUGHT = _THOUGHT + "<think>{{ '\\n' + thought | trim + '\\n' }}</think>{{ '\\n\\n' + words | trim }}"
_WITHOUT = _THOUGHT + "{{ words | trim }}"
_OPEN, _CLOSED = "<think>{{ '\\n' }}", "<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}"


def _chatml(new: str, old: str, prompt: str) -> str:
    return _CHATML.replace("NEW", new).replace("OLD", old).replace("PROMPT", prompt)


THINKS = _chatml(_WITH_THOUGHT, _WITHOUT, _OPEN)
"""Qwen3.5, thinking: the prompt opens a thought, each answer writes one, and earlier turns drop it."""
THINKS_IF_ASKED = _chatml(
    _WITH_THOUGHT, _WITHOUT, "{% if enable_thinking is true %}" + _OPEN + "{% else %}" + _CLOSED + "{% endif %}"
)
"""Qwen3.5, not thinking: the prompt closes the thought unless its caller wants one."""
EMPTY_TAGS = "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}" + _chatml(
    _THOUGHT + "<think>{{ '\\n' + thought | trim + '\\n' if thought }}</think>{{ words | trim }}",
    "<think></think>" + _WITHOUT,
    "{% if enable_thinking %}" + _OPEN + "{% else %}<think></think>{% endif %}",
)
"""Nemotron 3: the prompt opens a thought, and an answer without one begins with empty tags."""
CUTS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}"
    "<|assistant|>{{ 'call ' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}<|im_end|>"
    "{% elif m.role == 'tool' %}<|user|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "{% set words = m.content %}{% if '</think>' in words %}{% set words = words.split('</think>')[-1] %}{% endif %}"
    "<|assistant|>{{ words }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>" + _OPEN + "{% endif %}"
)
"""DeepSeek R1 and V3: the prompt opens a thought, and no answer is ever written with one; calls want null and text."""
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% set later = messages[loop.index:] | rejectattr('tool_calls') | selectattr('role', 'equalto', 'assistant') %}"
    "{% if m.thinking and not later | list %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to={{ call.name }}<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""gpt-oss: only the last answer has a thought and the token that ends a generation; thoughts before calls go later."""
PARTS = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}:"
    "{% if m.content[0].type == 'text' %}{{ ' ' }}{% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""SmolVLM: contents are lists of parts; of a string nothing is written."""

_SPECIAL = ("<|user|>", "<|assistant|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")


def tokenizer(template: str, **config: Any) -> TextTokenizer:
    """The tiny tokenizer with these templates' tokens; those of thoughts are ordinary ones, as the models have them."""
    config = {"eos_token": "<|return|>"} | config if template == CHANNELS else config
    return tiny.with_tokens(template, _SPECIAL, ("<think>", "</think>"), **config)
