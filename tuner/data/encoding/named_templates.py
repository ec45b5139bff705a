"""The chat templates that a recipe names: their sources, which ship with the program, and the tokens that they need."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.errors import DataError

DIRECTORY = Path(__file__).resolve().parents[1] / "templates"
_CONTROL_TOKENS = DIRECTORY / "control_tokens.json"
"""The control tokens that each template writes, besides the tokenizer's own bos_token and eos_token."""


@dataclass(frozen=True)
class NamedTemplate:
    """A built-in template."""

    name: str
    source: str
    tokens: Sequence[str]
    """Control tokens that it writes; a tokenizer that lacks one is given it."""

    def require_end(self, special_tokens: Mapping[str, str], where: str) -> None:
        """Check that a tokenizer has the eos_token with which the template ends answers, if it does. DataError."""
        if "eos_token" in self.source and "eos_token" not in special_tokens:
            raise DataError(
                f"{where}: the template {self.name} ends answers with the tokenizer's eos_token, and it has none",
                hint="write tokenizer.chat_template: chatml, which brings its own end of turn",
            )


def named_template(name: str | None) -> NamedTemplate | None:
    """Return the built-in template of this name; None for a path."""
    if name not in CHAT_TEMPLATES:
        return None
    source = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = json.loads(_CONTROL_TOKENS.read_bytes())
    return NamedTemplate(name, source, tuple(tokens.get(name, ())))


def template_source(name_or_path: str) -> str:
    """Return the source of a template by its name, or from its file. DataError."""
    named = named_template(name_or_path)
    if named is not None:
        return named.source
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"tokenizer.chat_template: {name_or_path}: {reason}",
            hint=f"name a file, or a template: {', '.join(CHAT_TEMPLATES)}",
        ) from error
