"""The chat templates that a recipe names: their sources, which ship with the program, and the tokens that they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.errors import DataError

DIRECTORY = Path(__file__).resolve().parents[1] / "templates"
_CHATML = ("<|im_start|>", "<|im_end|>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": _CHATML,
    "command-r": (
        *("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": (
        *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>"),
        *("<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    ),
    "granite": _GRANITE,
    "granite4": _GRANITE,
    "lfm2": (
        *_CHATML,
        *("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        *("<|tool_response_start|>", "<|tool_response_end|>"),
    ),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3.5": _CHATML,
}
"""The control tokens that a template writes, besides the tokenizer's own bos_token and eos_token."""


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
    return NamedTemplate(name, source, _TOKENS.get(name, ()))


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
