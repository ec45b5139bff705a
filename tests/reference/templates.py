"""Chat templates with {% generation %} written in by hand around what the assistant writes.

A block begins where the generation prompt's text ends and stops after the end-of-turn token; white space that a
template puts after that token is outside. Without such a token, the blank line that ends the turn is inside. The three
in MARKED are otherwise the models' own: `hf.encode_chat` asserts that both render the same text. Those in HAND_MADE,
for SmolLM2's tokenizer, are of kinds that are met.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "marked"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


MARKED = {name: _read(name) for name in ("smollm2", "qwen3", "llama3")}
CHATML_WHOLE = _read("chatml_whole")
"""SmolLM2's with a block around each message: what it says for answers, all of it for the others."""

_IF_ANSWER = "{% if m.role == 'assistant' %}"
_ADDED = "{% if add_generation_prompt %}"
_PROMPT = _ADDED + "<|im_start|>assistant\n{% endif %}"
_TRIMMED = "{{ m.content | trim }}"
_THOUGHTLESS = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"


def _block(answer: str) -> str:
    return "{% generation %}" + answer + "{% endgeneration %}"


def _chatml(answer: str = "{{ m.content }}", other: str = "{{ m.content }}", between: str = "{{ '\\n' }}") -> str:
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + _IF_ANSWER
    return f"{head}{_block(answer + '<|im_end|>')}{{% else %}}{other}<|im_end|>{{% endif %}}{between}{{% endfor %}}"


HAND_MADE = {
    "trims": _chatml(_TRIMMED, _TRIMMED) + _PROMPT,
    "no break between": _chatml(between="") + _PROMPT,
    "merges the system turn": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = ns.system + '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'assistant' %}" + _block("{{ ' ' + m.content | trim + ' ' }}<|im_end|>") + "{% else %}"
        "<|im_start|>[INST] {{ ns.system + m.content | trim }} [/INST]{% set ns.system = '' %}{% endif %}{% endfor %}"
    ),
    "begins with a token": "{{ bos_token }}<|endoftext|>" + _chatml() + _PROMPT,
    "drops earlier thoughts": _chatml("{% if loop.last %}{{ m.content }}{% else %}" + _THOUGHTLESS + "{% endif %}")
    + _PROMPT,
    "inserts an empty thought": _chatml(
        "{% if '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    )
    + _PROMPT,
    "closes the conversation": _chatml() + _ADDED + "<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}",
    "a prompt always follows": _chatml() + "{{ '<|im_start|>assistant\n' }}",
    "capital roles": _chatml().replace("m.role }}", "m.role | capitalize }}") + _PROMPT.replace("assis", "Assis"),
    "counts its messages": "{{ messages | length }} messages\n" + _chatml() + _PROMPT,
    "no control token": (
        "{% for m in messages %}"
        + _IF_ANSWER
        + "Answer:"
        + _block("{{ ' ' + m.content | trim + '\n\n' }}")
        + "{% else %}"
        "{{ m.role + ': ' + m.content | trim + '\n\n' }}{% endif %}{% endfor %}" + _ADDED + "Answer:{% endif %}"
    ),
    "a prompt that ends with a blank": (
        "{% for m in messages %}" + _IF_ANSWER + "Answer: " + _block("{{ m.content }}<|im_end|>") + "{% else %}"
        "{{ m.role }}: {{ m.content }}{% endif %}{{ '\n' }}{% endfor %}" + _ADDED + "Answer: {% endif %}"
    ),
}

_USER = "{% for m in messages %}{% if m.role == 'user' %}"
SENTENCEPIECE = {
    "inst": _USER
    + "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
    + _block("{{ ' ' + m.content.strip() + ' ' + eos_token }}")
    + "{% endif %}{% endfor %}",
    "inst without spaces": "{{ bos_token }}"
    + _USER
    + "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
    + _block("{{ m.content + eos_token }}")
    + "{% endif %}{% endfor %}",
    "turns": _USER
    + "{{ '<|user|>\n' + m.content + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n' }}"
    + _block("{{ m.content + eos_token }}")
    + "{{ '\n' }}{% endif %}{% endfor %}"
    + _ADDED
    + "{{ '<|assistant|>\n' }}{% endif %}",
    "spaces and two tokens": _USER
    + "{{ '  ' + bos_token + bos_token + ' user:\n' + m.content + eos_token + ' ' }}{% else %}"
    + "{{ '  ' + bos_token + bos_token + ' assistant:\n' }}"
    + _block("{{ m.content + eos_token }}")
    + "{{ ' ' }}{% endif %}{% endfor %}"
    + _ADDED
    + "{{ '  ' + bos_token + bos_token + ' assistant:\n' }}{% endif %}",
}
"""For tokenizers of Llama 2's kind, whose words begin with a space."""

IMPOSSIBLE = {
    "newest first": _chatml().replace("in messages", "in messages | reverse") + _PROMPT,
    "another prompt": _chatml() + _ADDED + "<|im_start|>model\n{% endif %}",
    "old answers in capitals": _chatml(
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content | upper }} of {{ messages | length }}{% endif %}"
    )
    + _ADDED
    + "<|im_start|>assistant of {{ messages | length }}\n{% endif %}",
}
"""No answer of these stands where its prompt ends."""


def unmarked(template: str) -> str:
    """The template as a model would have it."""
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)
