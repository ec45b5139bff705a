"""The built-in chat templates against those that other projects publish: the same text for the same messages.

    python -m tools.template_campaign [--sources DIRECTORY]

Fetches TRL, axolotl, FastChat and the sdist of llama-cpp-python from the package index (about 80 MB, nothing is
installed). Every prefix of a conversation is rendered by ours and by theirs, with and without a system message, and
where the table says so one with tools, calls and thoughts. Exits with 1 where a difference is found that is not in the
table below. Tokenizers' own templates are in tests/data/encoding/test_masks.py.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.commands import ROOT, asked
from tools.import_campaign import PACKAGES, fetch
from tools.tables import beside
from tuner.data.encoding.template import ChatTemplate
from tuner.data.encoding.tokenizer_files import named_template

FASTCHAT = "fschat==0.2.36"
"""Its conversations are Python."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its sdist holds the templates that llama.cpp is tested with."""
WANTED = {
    **{name: options for name, options in PACKAGES.items() if name.startswith(("trl", "axolotl"))},
    FASTCHAT: (),
    LLAMA_CPP: ("--no-binary", "llama-cpp-python"),
}
FOLDERS = {
    "trl": "trl-*/trl/chat_templates",
    "axolotl": "axolotl-*/src/axolotl/utils/chat_templates/templates",
    "llama.cpp": "llama_cpp_python-*/vendor/llama.cpp/models/templates",
}
"""Where the unpacked packages have their templates."""
_TABLE: dict[str, Any] = beside(__file__)
TURNS, SYSTEM, THOUGHTS, TOOLS = (_TABLE[name] for name in ("turns", "system", "thoughts", "tools"))
Messages = Sequence[dict[str, Any]]
Render = Callable[..., str]
"""Of messages, whether an answer is asked for, and tools."""


@dataclass(frozen=True)
class Published:
    """A template of another project."""

    ours: str
    where: str
    """`trl/NAME`, `axolotl/NAME`, `llama.cpp/NAME` (files) or `fastchat/NAME` (a conversation)."""
    compared: str = "both"
    """`both`; `plain` or `system`: only without, or only with, a system message."""
    eos: str = "</s>"
    tools: bool = False
    """Whether tools, tool calls and thoughts are compared too."""
    trailing: str = ""
    """What theirs writes after a conversation's last answer and ours does not."""
    why: str = ""


TABLE = tuple(Published(**one) for one in _TABLE["published"])


def theirs(published: Published, directory: Path) -> Render:
    """Their template as a function of messages and of whether an answer is asked for."""
    project, _, name = published.where.partition("/")
    if project == "fastchat":
        return _conversation(_module(next(directory.glob("fschat-*/fastchat/conversation.py"))), name)
    path = next(directory.glob(f"{FOLDERS[project]}/{name}.jinja"))
    return ChatTemplate(path.read_text(encoding="utf-8"), _tokens(published)).render


def _tokens(published: Published) -> dict[str, str]:
    return {"bos_token": "<s>", "eos_token": published.eos}


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fastchat_conversation", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["fastchat_conversation"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _conversation(module: Any, name: str) -> Render:
    """FastChat's prompt; it leaves the beginning of the text to the tokenizer."""

    def render(messages: Messages, asks: bool, tools: object) -> str:
        chat = module.get_conv_template(name)
        for message in messages:
            if message["role"] == "system":
                chat.set_system_message(message["content"])
            else:
                chat.append_message(chat.roles[message["role"] == "assistant"], message["content"])
        if asks:
            chat.append_message(chat.roles[1], None)
        return str(chat.get_prompt())

    return render


def conversations(published: Published) -> Iterator[tuple[Messages, bool, object]]:
    """Every prefix of the conversations, whether an answer is asked for at its end, and the tools."""
    kinds = {"both": ([], [SYSTEM]), "plain": ([],), "system": ([SYSTEM],)}[published.compared]
    for before in kinds:
        for turns, tools in ((TURNS, None), (THOUGHTS, None), (THOUGHTS, TOOLS))[: 3 if published.tools else 1]:
            for stop in range(1, len(turns) + 1):
                yield [*before, *turns[:stop]], turns[stop - 1]["role"] in ("user", "tool"), tools


def differences(published: Published, directory: Path) -> Iterator[tuple[str, str]]:
    """Texts of ours and of theirs that are not the same."""
    named = named_template(published.ours)
    assert named is not None
    own, other = ChatTemplate(named.source, _tokens(published)), theirs(published, directory)
    for messages, asks, tools in conversations(published):
        mine, yours = own.render(messages, asks, tools), other(messages, asks, tools)  # type: ignore[arg-type]
        if published.where.startswith("fastchat"):
            mine = mine.removeprefix("<s>")
        if not asks:
            yours = yours.removesuffix(published.trailing)
        if mine != yours:
            yield mine, yours


def main(words: Sequence[str] | None = None) -> int:
    """Print each comparison; 1 where a text differs."""
    given = asked(__doc__, {}, words, sources=(ROOT / ".demo" / "other-tools", "where they are unpacked"))
    fetch(given.sources, WANTED)
    failed = 0
    for published in TABLE:
        found = list(differences(published, given.sources))
        failed += bool(found)
        tools = ", tools and thoughts" if published.tools else ""
        note = f"  ({published.why})" if published.why else ""
        where = f"{published.where}, {published.compared}{tools}"
        print(f"{'differs' if found else 'equal':8} {published.ours:13} {where}{note}")
        for mine, yours in found[:1]:
            print(f"  ours   {mine!r}\n  theirs {yours!r}")
    names = {published.ours for published in TABLE}
    print(f"{len(TABLE) - failed} of {len(TABLE)} equal, {len(names)} templates")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
