"""The templates of a tokenizer that transformers loaded, rendered within limits to the text that it would write."""

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.data.encoding.template import ChatTemplate, Message
from tuner.errors import DataError


class LoadedTemplates:
    """A loaded tokenizer's templates, by name; `origin` is what errors name. DataError where one does not compile."""

    def __init__(self, tokenizer: Any, origin: str | None = None) -> None:
        found = tokenizer.chat_template or {}
        sources = found if isinstance(found, dict) else {"default": found}
        tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        where = f"{origin or tokenizer.name_or_path}: the chat template"
        self._templates = {
            name: ChatTemplate(source, tokens, name=where)
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render as `apply_chat_template` does; DataError where there is no template, or it refuses."""
        chosen = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if chosen is None:
            raise DataError("the tokenizer has no chat template of the name default")
        return chosen.render(messages, add_generation_prompt, tools)
