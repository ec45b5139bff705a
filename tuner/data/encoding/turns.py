"""Examples as text, and where in it each turn lies: proven from the chat template, never by looking for words.

An answer begins where the render of the messages before it, with the generation prompt, ends: that render must be a
prefix of the whole text, since it is what a model is prompted with. It ends with the first end-of-turn token after
that, which must stand before the content of the next message; where that content stands is proven by rendering once
more with a mark in it, which must change nothing but the mark. Without end-of-turn tokens the render through the
message must be a prefix. A row where this cannot be shown is refused with the reason.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tuner.data.encoding.probe import Probe, has_reserved
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.problems import KeyPath, RowProblem
from tuner.data.reading.rows import Conversation, Example, PlainText, PromptCompletion
from tuner.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "all"]
SpecialTokens = Literal["refuse", "escape"]

GUARD, BREAK = "\ufdd4", "\ufdd3"
"""GUARDs stand around a control token that a user wrote out, and a BREAK in it, while the text is rendered and cut."""
_FIRST_MARK, _MARKS = 0xFDD5, 24
NOT_SHOWN = "tools not written by the template"
CALLS_AS_TEXT = "tool calls written as text: the template has none"
SHORTENED = "reasoning not written by the template"
OPEN_ENDED = "end of turn not trained: the template marks it as not generated"
REWRITTEN = "answers after turns that the template writes otherwise while they are the prompt"
NO_END = "answers without an end-of-turn token"


class Turn(NamedTuple):
    """Characters [start, stop) of a text, and what is done with their tokens."""

    start: int
    stop: int
    trained: bool
    rule: str
    is_answer: bool


class Plan(NamedTuple):
    """A text with its turns; tokens outside of them get `default`."""

    text: str
    turns: Sequence[Turn]
    default: bool
    default_rule: str
    framed: bool = False
    """Whether the tokenizer's own tokens around a text and the end token are added."""
    escaped: bool = False
    """Whether GUARD stands in the text."""
    notes: tuple[str, ...] = ()


class Planner:
    """Plans examples for a tokenizer; `train_on` is the recipe's, and `all` for pre-training."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn, special_tokens: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._escapes = special_tokens == "escape"

    def plan(self, example: Example) -> Plan:
        """Return the plan of an example that is text. Raises RowProblem, and DataError without a chat template."""
        everything = self._train_on == "all"
        if isinstance(example, PlainText):
            text = self._checked(example.text, ("text",))
            return Plan(text, (), True, "text", framed=True, escaped=GUARD in text)
        if isinstance(example, PromptCompletion):
            prompt = self._checked(example.prompt, ("prompt",))
            text, cut = prompt + self._checked(example.completion, ("completion",)), len(prompt)
            if self._tokenizer.find_special(text) is not None:
                raise RowProblem("prompt and completion together write out a control token", path=("completion",))
            turns = [Turn(0, cut, everything, "prompt", False), Turn(cut, len(text), True, "completion", True)]
            return Plan(text, turns, everything, "start of text", framed=True, escaped=GUARD in text)
        if not isinstance(example, Conversation):
            raise TypeError(f"{type(example).__name__} is not text")
        return self.conversation(example, self._readable(example))

    def conversation(self, example: Conversation, messages: "list[dict[str, Any]] | None" = None) -> Plan:
        """Return the plan of a conversation; `messages` are its messages as the template is to see them."""
        chat = _Chat(self._tokenizer, example.messages if messages is None else messages, example.tools)
        everything = self._train_on == "all"
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = self._wanted(example, answers)
        turns: list[Turn] = []
        try:
            for i, message in enumerate(chat.messages):
                if wanted[i] == everything and i not in answers[-1:]:
                    continue  # nothing here differs from the rest
                try:
                    start, stop = chat.answer(i, answers) if i in answers else chat.turn(i)
                except RowProblem:
                    if wanted[i] == everything:
                        continue  # only the held-out sample would use it
                    raise
                rule = f"{message['role']} turn" if example.train[i] is None else f"train: {str(wanted[i]).lower()}"
                turns.append(Turn(start, stop, wanted[i], rule, i in answers))
            text = chat.text
        except DataError as error:
            raise RowProblem(error.message, 1) from error
        rule = "all" if everything else "prompt"
        return Plan(text, turns, everything, rule, False, GUARD in text, self._notes(example, chat))

    def _wanted(self, example: Conversation, answers: list[int]) -> list[bool]:
        by_rule = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(example.messages))}
        rule = set(by_rule[self._train_on])
        return [i in rule if own is None else own for i, own in enumerate(example.train)]

    def _readable(self, example: Conversation) -> list[dict[str, Any]]:
        """The messages as the template can write them, with written-out control tokens refused or guarded."""
        as_text = "tool_calls" not in self._tokenizer.template_for(example.tools).source
        messages = []
        for i, message in enumerate(example.messages):
            if as_text and message.get("tool_calls"):
                message = _call_as_text(message, ("messages", i))  # noqa: PLW2901 (the same message, as it is written)
            messages.append({name: self._safe(value, ("messages", i, name)) for name, value in message.items()})
        if example.tools:
            self._safe(example.tools, ("tools",))
        return messages

    def _safe(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, str):
            return self._checked(value, path)
        found = self._tokenizer.find_special(json.dumps(value, ensure_ascii=False)) if value else None
        if found is None:
            return value
        if self._escapes and path[0] != "tools":
            return _mapped(value, self._checked, path)
        raise _written_out(found[0], path)

    def _checked(self, text: str, path: KeyPath) -> str:
        if not text.isascii() and has_reserved(text):
            raise RowProblem("a noncharacter (U+FDD0 to U+FDEF) is no text", path=path)
        found = self._tokenizer.find_special(text)
        if found is None:
            return text
        if self._escapes:
            return self._tokenizer.change_specials(text, lambda token: f"{GUARD}{token[0]}{BREAK}{token[1:]}{GUARD}")
        raise _written_out(found[0], path)

    def _notes(self, example: Conversation, chat: "_Chat") -> tuple[str, ...]:
        source = self._tokenizer.template_for(example.tools).source
        notes = list(chat.notes)
        if example.tools and "tools" not in source.replace("tool_calls", ""):
            notes.append(NOT_SHOWN)
        if any(message.get("tool_calls") for message in example.messages) and "tool_calls" not in source:
            notes.append(CALLS_AS_TEXT)
        thoughts = [m["reasoning_content"] for m in chat.messages if m.get("reasoning_content")]
        if any(thought.strip() not in chat.text for thought in thoughts if isinstance(thought, str)):
            notes.append(SHORTENED)
        return tuple(dict.fromkeys(notes))


class _Chat:
    """One conversation's renders, each made at most once."""

    def __init__(self, tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: Any) -> None:
        self.messages = messages
        self.notes: list[str] = []
        self._tokenizer = tokenizer
        self._tools = tools

    @cached_property
    def _marked(self) -> tuple[str, list[tuple[int, int]]]:
        template = self._tokenizer.template_for(self._tools)
        if template.has_generation_marks:
            return template.render_marked(self.messages, self._tools)
        return template.render(self.messages, tools=self._tools), []

    @property
    def text(self) -> str:
        """The whole conversation."""
        return self._marked[0]

    def answer(self, i: int, answers: list[int]) -> tuple[int, int]:
        """Characters of answer i, its end-of-turn token included and white space after that not."""
        if self._tokenizer.template_for(self._tools).has_generation_marks:
            spans = self._marked[1]
            if len(spans) != len(answers):
                raise RowProblem("the template marks another number of turns than the assistant has", 1)
            start, stop = spans[answers.index(i)]
            if self._end(start, stop) is None:
                self.notes.append(OPEN_ENDED)
            whole = self._end(start, len(self.text)) or stop
            # A token that takes white space with it cannot be trained without.
            return start, whole if self.text[stop:whole].isspace() else stop
        start = self.answer_start(i)
        last = i + 1 == len(self.messages)
        limit = len(self.text) if last else self._content_starts.get(i + 1, -1)
        # Nothing before the answer's own words ends it, where they can be shown.
        words = max(start, (self._find([i]) or {i: start})[i])
        end = self._end(words, limit) if limit >= start else self._end_as_last(i, words)
        if end is None:
            through = len(self._through(i))
            end = self._end(words, through)
            if end is None:
                self.notes.append(NO_END)
                end = self._without_blanks(start, through)
        return start, end

    def answer_start(self, i: int) -> int:
        """The character at which answer i begins; RowProblem where that is not shown."""
        prompt = self._render(i, prompt=True)
        if self.text.startswith(prompt):
            return len(prompt)
        # Some templates shorten earlier turns once more follows. The turn before still shows where this one begins.
        before = self._render(i)
        header = prompt[len(before) :].lstrip() if prompt.startswith(before) else ""
        starts = [self._after_turn(i - 1), self._after_others(i) - len(header)]
        start = next((at for at in starts if at >= 0 and header and self.text.startswith(header, at)), None)
        if start is not None:
            self.notes.append(REWRITTEN)
            return start + len(header)
        raise RowProblem(
            f"the template writes the text before message {i} differently when it is a prompt", path=("messages", i)
        )

    def _after_turn(self, i: int) -> int:
        """Where the text goes on after message i's end-of-turn token and white space; -1 where that is not shown."""
        found = self._find([i]) if i >= 0 else None
        end = None if found is None else self._end(found[i], len(self.text))
        return -1 if end is None else end + len(self.text[end:]) - len(self.text[end:].lstrip())

    def _after_others(self, i: int) -> int:
        """Where the content of message i begins, when those of the messages before it stand before it; or -1."""
        wanted = [k for k in range(i + 1) if not str.isspace(self.messages[k]["content"] or " ")][-_MARKS:]
        found = self._find(wanted) if wanted and wanted[-1] == i else None
        return -1 if found is None else found[i]

    def _end_as_last(self, i: int, start: int) -> int | None:
        """The end of answer i by itself: what stands there must end the answer where it comes last, too."""
        alone = _Chat(self._tokenizer, self.messages[: i + 1], self._tools)
        first, end = alone.answer_start(i), self._end(start, len(self.text))
        last = alone._end(first, len(alone.text))
        same = end is not None and last is not None and alone.text[first:last].endswith(self.text[start:end])
        return end if same else None

    def turn(self, i: int) -> tuple[int, int]:
        """Characters that message i adds to the whole text, header and all."""
        if i == 0:
            return self._opening(), len(self._through(0))
        return len(self._prefix(self._render(i), i, "when fewer messages follow", before=True)), len(self._through(i))

    def _opening(self) -> int:
        """Where message 0 begins: after a turn that the template put before it, such as its own system prompt."""
        found = self._find([0])
        if found is None:
            raise RowProblem("where the template writes message 0 cannot be told", path=("messages", 0))
        start, content = 0, found[0]
        while (end := self._end(start, content)) is not None:
            start = end
        return start + len(self.text[start:content]) - len(self.text[start:content].lstrip()) if start else 0

    def _render(self, count: int, prompt: bool = False) -> str:
        return self._tokenizer.render(self.messages[:count], prompt, self._tools) if count or prompt else ""

    def _through(self, i: int) -> str:
        if i + 1 == len(self.messages):
            return self.text
        return self._prefix(self._render(i + 1), i, "when more messages follow", before=False)

    def _prefix(self, part: str, i: int, when: str, before: bool) -> str:
        if not self.text.startswith(part):
            what = f"the text before message {i}" if before else f"message {i}"
            raise RowProblem(f"the template writes {what} differently {when}", path=("messages", i))
        return part

    def _end(self, start: int, limit: int) -> int | None:
        """Where the first end-of-turn token of text[start:limit] ends: what users write out is refused or guarded."""
        return self._tokenizer.end_of_turn(self.text, start, limit)

    def _without_blanks(self, start: int, stop: int) -> int:
        """The stop after a last control token that only white space follows; that space is not the model's."""
        last = self._tokenizer.last_special(self.text, start, stop)
        return last[1] if last is not None and not self.text[last[1] : stop].strip() else stop

    @cached_property
    def _content_starts(self) -> dict[int, int]:
        """Message -> where its content stands in the text, of those after an answer for which that is proven."""
        wanted = [i + 1 for i, message in enumerate(self.messages[:-1]) if message["role"] == "assistant"]
        together = self._find(wanted)
        if together is not None:
            return together
        return {i: found[i] for i in wanted if (found := self._find([i])) is not None}

    def _find(self, wanted: list[int]) -> dict[int, int] | None:
        """Where the contents of messages begin in the text, or None where marks there change more than the marks."""
        marks = {chr(_FIRST_MARK + k % _MARKS): i for k, i in enumerate(wanted)}
        contents = [self.messages[i]["content"] for i in wanted]
        if len(marks) < len(wanted) or any(not content or str.isspace(content) for content in contents):
            return None
        messages = list(self.messages)
        for mark, i in marks.items():
            messages[i] = {**messages[i], "content": _with_mark(messages[i]["content"], mark)}
        try:
            marked = self._tokenizer.render(messages, tools=self._tools)
        except DataError:
            return None
        found = {marks[mark]: marked.find(mark) - k for k, mark in enumerate(marks)}
        unmarked = marked.translate(dict.fromkeys(map(ord, marks)))
        in_order = list(found.values()) == sorted(found.values()) and min(found.values(), default=0) >= 0
        return found if in_order and unmarked == self.text and len(marked) == len(self.text) + len(marks) else None


def _written_out(token: str, path: KeyPath) -> RowProblem:
    """The problem of a control token in somebody's text. Tools are never escaped: there is no setting for them."""
    hint = None if path[0] == "tools" else "tokenizer.special_tokens_in_text: escape"
    return RowProblem(f"the control token {token} is written out in the text", path=path, hint=hint)


def _with_mark(content: str, mark: str) -> str:
    """The content with a mark before its first character that is no white space: templates trim."""
    if isinstance(content, Probe):
        return content.with_mark(mark)
    blank = len(content) - len(content.lstrip())
    return content[:blank] + mark + content[blank:]


def _call_as_text(message: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    """The message with its tool calls as JSON lines in the content."""
    calls = [call.get("function", call) for call in message["tool_calls"]]
    if any("name" not in call for call in calls):
        raise RowProblem("a tool call has a name", path=(*path, "tool_calls"))
    lines = [json.dumps({"name": c.get("name"), "arguments": c.get("arguments")}, ensure_ascii=False) for c in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *lines] if message["content"] else lines)}


def _mapped(value: Any, change: Any, path: KeyPath) -> Any:
    if isinstance(value, str):
        return change(value, path)
    if isinstance(value, dict):
        return {name: _mapped(item, change, (*path, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change, (*path, i)) for i, item in enumerate(value)]
    return value
