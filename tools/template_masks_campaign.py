"""Chats of every kind with the templates that newest model families publish: masks, and the words of what is refused.

    python -m tools.template_masks_campaign TOKENIZER [--sources DIRECTORY] [--only NAME ...]

TOKENIZER is a directory with a byte-level tokenizer.json, to which the control tokens of each template are added. TRL,
axolotl and llama.cpp's templates (in the sdist of llama-cpp-python) are fetched from the package index; nothing is
installed. Each chat has turns, thoughts, tools, a system or a developer message. Of each document the ids before an
answer must be those of transformers' `apply_chat_template` with the generation prompt; what is trained begins there,
holds the answer's words, thought and calls or is counted as lacking them, and ends with the template's end token.
A line says for each template how many chats are kept and what is noted; then why chats are refused. Exits with 1 where
a document is not so, or a chat is refused for another reason than the template's own words.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import UndefinedError

from tools.commands import ROOT, asked, workplace
from tools.import_campaign import fetch
from tools.tables import beside
from tools.template_campaign import FOLDERS, SYSTEM, THOUGHTS, TOOLS, TURNS, WANTED
from tuner.config.recipe import AddedToken
from tuner.data.encoding import turns
from tuner.data.encoding.chat import NO_END
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import EncodedBatch
from tuner.data.encoding.tokenizer import TextTokenizer, with_control_tokens, with_tokens
from tuner.data.reading.examples import Conversation
from tuner.data.reading.records import parse_record

CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[gMASK\]|<sop>"
)
"""Control tokens as templates write them."""
CALLERS: tuple[dict[str, bool], ...] = (
    {},
    *({name: value} for name in ("enable_thinking", "thinking") for value in (False, True)),
)


@dataclass(frozen=True)
class Published:
    """A template, and the tokens at which its models stop."""

    where: str
    ends: tuple[str, ...] = ("<|im_end|>",)
    tokens: tuple[str, ...] = ()
    """Control tokens that its source puts together of parts."""


TABLE = tuple(Published(**one) for one in beside(__file__))


def chats() -> dict[str, dict[str, Any]]:
    """Rows of every kind by name."""
    developer = {"role": "developer", "content": "Be brief."}
    inside = [_thought_inside(message) for message in THOUGHTS[:2]]
    named = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in THOUGHTS[:2]]
    fields = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in named]
    plain = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in THOUGHTS]
    return {
        "plain": {"messages": TURNS}, "system": {"messages": [SYSTEM, *TURNS]},
        "developer": {"messages": [developer, *TURNS]}, "thoughts": {"messages": [*THOUGHTS[:2], *TURNS[:2]]},
        "thoughts in the content": {"messages": inside}, "thoughts named thinking": {"messages": fields},
        "tools": {"messages": plain, "tools": TOOLS},
        "one call at a time": {"messages": [*TURNS[:2], *plain[7:]], "tools": TOOLS},
        "tools and thoughts": {"messages": THOUGHTS, "tools": TOOLS},
        "ends with a call": {"messages": [SYSTEM, *plain[7:9]], "tools": TOOLS},
        "calls without tools": {"messages": plain[7:]},
        "a name": {"messages": [{"role": "user", "content": "Who?", "name": "Ada"}, TURNS[1]]},
    }


def _thought_inside(message: dict[str, Any]) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    content = message["content"] if thought is None else f"<think>\n{thought}\n</think>\n\n{message['content']}"
    return {"role": message["role"], "content": content}


def tokenizer_of(published: Published, source: str, directory: Path) -> TextTokenizer:
    """The base tokenizer with the template and its control tokens."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name == "tokenizer.json"}
    bos, eos = "<|begin|>", published.ends[0]
    config = f'{{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "{bos}", "eos_token": "{eos}"}}'
    files["tokenizer_config.json"] = config.encode()
    found = [*CONTROL.findall(source), *published.tokens, *published.ends, bos]
    files, added = with_control_tokens(files, (), tuple(dict.fromkeys(found)))
    if added:
        files, _ = with_tokens(files, [AddedToken(token=one.token, special=True) for one in added])
    ids = TextTokenizer(files)
    return TextTokenizer(files, source, [ids.encode(end)[0] for end in published.ends])


@dataclass(frozen=True)
class Judge:
    """Compares documents with transformers' tokenizer."""

    theirs: Any
    ends: frozenset[int]
    source: str
    """The template."""

    def wrong(
        self, example: Conversation, documents: Sequence[tuple[list[int], list[bool]]], notes: Mapping[str, int]
    ) -> str | None:
        """What is wrong with the documents of a chat; None where nothing is, or `notes` say so."""
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        found = [(ids, start, stop) for ids, trained in documents for start, stop in _runs(trained)]
        if len(found) != len(answers):
            return f"{len(found)} trained stretches for {len(answers)} answers"
        for i, (ids, start, stop) in zip(answers, found, strict=True):
            # A template with marks says itself what is trained, whatever it writes as a prompt.
            is_marked = "endgeneration" in self.source
            if not is_marked and not any(ids[:start] == prompt for prompt in self._prompts(example, i)):
                return f"message {i}: the ids before it are those of no prompt"
            text = self.theirs.decode(ids[start:stop])
            for what, words, note in _said(example.messages[i]):
                if words not in text and note not in notes:
                    return f"message {i}: its {what} is not in {text!r}"
            reason = None if NO_END in notes else self._wrong_end(ids[start:stop])
            if reason is not None:
                return f"message {i}: {reason}"
        return None

    def _wrong_end(self, ids: list[int]) -> str | None:
        if "endgeneration" in self.source:  # a template's own marks may hold the white space after an end
            while ids and not self.theirs.decode(ids[-1:]).strip():
                ids = ids[:-1]
        earlier = [self.theirs.decode([k]) for k in ids[:-1] if k in self.ends]
        if ids[-1] not in self.ends:
            return f"it ends with {self.theirs.decode(ids[-3:])!r}"
        return f"there is an end before its end: {earlier}" if earlier else None

    def _prompts(self, example: Conversation, i: int) -> Iterator[list[int]]:
        for said in CALLERS:
            options = {"tools": example.tools, "add_generation_prompt": True, "return_dict": False, **said}
            # DeepSeek's templates join arguments to a text; some have no place for calls at all.
            forms = (dict, _with_text, _without_content, _as_words)
            for form in forms:
                with suppress(TypeError, UndefinedError):
                    messages = [form(message) for message in example.messages[:i]]
                    yield self.theirs.apply_chat_template(messages, **options)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [{**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls]
    functions = [{"type": "function", "function": function} for function in texts]
    return {**message, "tool_calls": functions} if calls else message


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**_with_text(message), "content": message["content"] or None}


def _as_words(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls as lines of JSON in the content."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    lines = [json.dumps({key: call[key] for key in ("name", "arguments")}, ensure_ascii=False) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [message["content"]]), *lines])} if calls else message


def _said(message: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The words of an answer, its calls and its thought, each with the note that counts it as lacking."""
    *thoughts, words = re.split("</?think>", message["content"])
    yield "content", words.strip(), f"{turns.CONTENT_NOT_SHOWN}: assistant"
    for call in message.get("tool_calls", ()):
        for text in (call["function"]["name"], *(k for k in call["function"]["arguments"])):
            yield "call", text, turns.CALLS_NOT_SHOWN
    for thought in [*thoughts, *(message.get(name, "") for name in ("reasoning_content", "thinking", "reasoning"))]:
        yield "thought", thought.strip(), turns.SHORTENED


def _runs(trained: list[bool]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.array([False, *trained, False], dtype=np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def judge(published: Published, source: str, directory: Path) -> int:
    """Print what becomes of the chats with a template; how many are wrong, or refused for no words of the template."""
    tokenizer = tokenizer_of(published, source, directory)
    rows = chats()
    examples = [parse_record(row) for row in rows.values()]
    encoder = Encoder(tokenizer, "assistant")
    batches = [encoder.encode([example]) for example in examples]
    with workplace() as work:
        from transformers import AutoTokenizer

        tokenizer.save(work)
        theirs = AutoTokenizer.from_pretrained(work)  # type: ignore[no-untyped-call]
    judged = Judge(theirs, frozenset(theirs.convert_tokens_to_ids(list(published.ends))), source)
    kept = sum(not batch.problems for batch in batches)
    documents = sum(len(batch.records) for batch in batches)
    print(f"{published.where:40} {kept:2} of {len(rows)} chats, {documents} documents", flush=True)
    for note, count in Counter(note for batch in batches for note in batch.notes).items():
        print(f"    note: {count} {note}")
    failed = 0
    for name, example, batch in zip(rows, examples, batches, strict=True):
        assert isinstance(example, Conversation)
        for problem in batch.problems.values():
            is_own = "the chat template refuses these messages" in problem.reason
            failed += not is_own
            print(f"    {'refused' if is_own else 'REFUSED'}: {name}: {problem.reason}")
        left_out = batch.by_answer.get(0, ())
        for reason in left_out:
            print(f"    left out: {name}: {reason}")
        is_checked = not batch.problems and not left_out
        wrong = judged.wrong(example, list(_documents(batch, 0)), batch.notes) if is_checked else None
        failed += wrong is not None
        if wrong is not None:
            print(f"    WRONG: {name}: {wrong}")
    return failed


def _documents(batch: EncodedBatch, row: int) -> Iterator[tuple[list[int], list[bool]]]:
    for k in np.flatnonzero(batch.records == row).tolist():
        tokens = slice(int(batch.offsets[k]), int(batch.offsets[k + 1]))
        yield batch.input_ids[tokens].tolist(), batch.trained[tokens].tolist()


def main(words: Sequence[str] | None = None) -> int:
    """Judge every template; 1 where something is wrong."""
    sources = (ROOT / ".demo" / "other-tools", "where they are unpacked")
    given = asked(__doc__, {"tokenizer": Path}, words, sources=sources, only=[])
    fetch(given.sources, WANTED)
    failed: Counter[str] = Counter()
    for published in TABLE:
        project, _, name = published.where.partition("/")
        if given.only and name not in given.only:
            continue
        path = next(given.sources.glob(f"{FOLDERS[project]}/{name}.jinja"))
        failed[published.where] = judge(published, path.read_text(encoding="utf-8"), given.tokenizer)
    right = sum(count == 0 for count in failed.values())
    print(f"{right} of {len(failed)} templates without a fault; {len(chats())} chats each")
    return 1 if right < len(failed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
