"""A Modelfile for Ollama: its file, the chat template in Go's language where it is one of ours, and where turns end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.data.encoding.tokenizer_files import template_source
from tuner.export.gguf.tables import table
from tuner.runtime.files import write_atomic


@dataclass(frozen=True)
class Modelfile:
    """Its text, and the name of the template in it; None where Ollama would take one of its own."""

    text: str
    template: str | None

    def in_words(self) -> str:
        """What it has, for people."""
        if self.template is None:
            return "without a template: no Go template of this chat template is known, and Ollama takes one of its own"
        return f"with the template {self.template}, without tools"

    def write(self, target: Path) -> None:
        """Put it next to a file. Raises MachineError."""
        write_atomic(place(target), self.text.encode())


def place(target: Path) -> Path:
    """Where the Modelfile of a file is."""
    return target.with_name(f"{target.name.removesuffix('.gguf')}.Modelfile")


def modelfile(name: str, tokenizer: Any, words: Mapping[str, Any], ends: Sequence[int]) -> Modelfile:
    """For the file of this name with this tokenizer, whose keys in it are ``words``."""
    found = named(words.get("tokenizer.chat_template"))
    lines = [f"FROM ./{name}\n"]
    if found is not None:
        adds = words["tokenizer.ggml.add_bos_token"]
        text = table("ollama")[found].replace("BOS", "" if adds else tokenizer.bos_token or "")
        lines.append(f'TEMPLATE """{text.replace("EOS", tokenizer.eos_token or "")}"""\n')
    stops = tokenizer.convert_ids_to_tokens(list(ends))
    return Modelfile("".join([*lines, *(f'PARAMETER stop "{stop}"\n' for stop in stops)]), found)


def named(template: str | None) -> str | None:
    """Which of ours a template is that has one in Go's language; None for another."""
    known = [name for name in CHAT_TEMPLATES if name in table("ollama")]
    return next((name for name in known if template_source(name) == template), None)
