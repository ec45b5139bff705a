"""The chat templates that a recipe may name, and the type of the key that takes a name or the path of a file."""

import re
from dataclasses import dataclass

from tuner.config.value_types import Text, meant, shown

CHAT_TEMPLATES = (
    "alpaca", "chatml", "command-r", "deepseek", "gemma", "gemma4", "granite", "granite4", "lfm2", "llama2", "llama3",
    "mistral", "mistral-nemo", "phi3", "phi4", "qwen", "qwen3", "qwen3.5", "tulu", "vicuna", "zephyr",
)  # fmt: skip
"""Names of the built-in templates: `tuner/data/templates` has a file of each."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def is_template_word(text: str) -> bool:
    """Whether a text is written like a template's name: a path of that form is written with `./`."""
    return _WORD.fullmatch(text) is not None


@dataclass(frozen=True)
class TemplateNameOrPath(Text):
    """The name of a built-in chat template, or the path of a jinja file."""

    what: str = f"the name of a chat template ({', '.join(CHAT_TEMPLATES)}) or the path of a jinja file"

    def read(self, value: object) -> str:
        """Return the name or the path."""
        text = super().read(value)
        if is_template_word(text) and text not in CHAT_TEMPLATES:
            near = meant(text.lower(), CHAT_TEMPLATES, 0.6)
            raise ValueError(
                f"got {shown(text)}: no file, and no chat template has this name; allowed: {self.what}{near}"
            )
        return text
