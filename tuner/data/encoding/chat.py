"""One conversation as its template writes it, and where in that text each message and answer lies.

An answer begins where the render of the messages before it, with the generation prompt, ends: that render must be a
prefix of the whole text, since it is what a model is prompted with. It ends with the first end-of-turn token after
that, which must stand before the content of the next message; where that content stands is proven by rendering once
more with a mark in it, which must change nothing but the mark. Without end-of-turn tokens the render through the
message must be a prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tuner.data.encoding.template import NO_VARIABLES
from tuner.data.encoding.template_spy import TemplateSpy
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.problems import RecordProblem
from tuner.errors import DataError

FIRST_MARK, _MARKS = 0xFDD5, 24
OPEN_ENDED = "end of turn not trained: the template marks it as not generated"
REWRITTEN = "answers after turns that the template writes differently when they are the prompt"
NO_END = "answers without an end-of-turn token"


@dataclass(eq=False)
class Chat:
    """One conversation's renders, each made at most once."""

    tokenizer: TextTokenizer
    messages: list[dict[str, Any]]
    tools: Any
    variables: Mapping[str, Any] = field(default_factory=lambda: NO_VARIABLES)
    """What is passed to the template with the messages."""
    notes: list[str] = field(default_factory=list)
    _prompts: dict[int, str] = field(default_factory=dict)

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what the assistant writes."""
        return self.tokenizer.template_for(self.tools).has_generation_marks

    @cached_property
    def _marked(self) -> tuple[str, list[tuple[int, int]]]:
        if self.is_marked:
            return self.tokenizer.template_for(self.tools).render_marked(self.messages, self.tools)
        return self._rendered(self.messages), []

    @property
    def text(self) -> str:
        """The whole conversation."""
        return self._marked[0]

    def answer(self, i: int, answers: list[int], start: int | None = None) -> tuple[int, int]:
        """Characters of answer i, its end-of-turn token included and white space after that not.

        It begins at `start` where that is known. RecordProblem, DataError.
        """
        if self.is_marked:
            spans = self._marked[1]
            if len(spans) != len(answers):
                raise RecordProblem("the template marks another number of turns than the assistant has", 1)
            start, stop = spans[answers.index(i)]
            if self._end(start, stop) is None:
                self.notes.append(OPEN_ENDED)
            whole = self._end(start, len(self.text)) or stop
            # A token that takes white space with it cannot be trained without.
            return start, whole if self.text[stop:whole].isspace() else stop
        start = self.answer_start(i) if start is None else start
        limit = len(self.text) if i + 1 == len(self.messages) else self._content_starts.get(i + 1, -1)
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

    def prompt(self, i: int) -> str:
        """What a model is given to write message i: the messages before it, and the generation prompt. DataError."""
        if i not in self._prompts:
            self._prompts[i] = self._rendered(self.messages[:i], prompt=True)
        return self._prompts[i]

    def answer_start(self, i: int) -> int:
        """The character at which answer i begins; RecordProblem where that is not shown."""
        prompt = self.prompt(i)
        if self.text.startswith(prompt):
            return len(prompt)
        # Some templates shorten earlier turns once more follows. The turn before still shows where this one begins.
        before = self._render(i)
        header = prompt[len(before) :].lstrip() if prompt.startswith(before) else ""
        starts = [self._after_turn(i - 1), self._after_others(i) - len(header)]
        start = next((at for at in starts if at >= 0 and header and self.text.startswith(header, at)), None)
        words = self._find([i])
        if start is not None and (words is None or words[i] >= start + len(header)):
            self.notes.append(REWRITTEN)
            return start + len(header)
        raise RecordProblem(
            f"the template writes the text before message {i} differently when it is a prompt", path=("messages", i)
        )

    def turn_start(self, i: int) -> int | None:
        """Where answer i, the last message, begins though it changes what is written before it; None if not shown.

        All from the last content before it to the answer must be the same with it and without, and the generation
        prompt must stand after that. DataError.
        """
        before, prompt = self._render(i), self.prompt(i)
        last = next((k for k in reversed(range(i)) if not str.isspace(self.messages[k]["content"] or " ")), None)
        if last is None or not prompt.startswith(before):
            return None
        here = self._find([last])
        there = Chat(self.tokenizer, self.messages[:i], self.tools, self.variables)._find([last])
        if here is None or there is None or not self.text.startswith(prompt[there[last] :], here[last]):
            return None
        return here[last] + len(prompt) - there[last]

    def _after_turn(self, i: int) -> int:
        """Where the text continues after message i's end-of-turn token and white space; -1 where that is not shown."""
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
        alone = Chat(self.tokenizer, self.messages[: i + 1], self.tools, self.variables)
        first, end = alone.answer_start(i), self._end(start, len(self.text))
        last = alone._end(first, len(alone.text))
        same = end is not None and last is not None and alone.text[first:last].endswith(self.text[start:end])
        return end if same else None

    def turn(self, i: int) -> tuple[int, int]:
        """Characters that message i adds to the whole text, header and all."""
        otherwise = f"the text before message {i} differently when fewer messages follow"
        start = len(self._prefix(self._render(i), i, otherwise)) if i else self._opening()
        return start, len(self._through(i))

    def _opening(self) -> int:
        """Where message 0 begins: after a turn that the template put before it, such as its own system prompt."""
        found = self._find([0])
        if found is None:
            raise RecordProblem("where the template writes message 0 cannot be determined", path=("messages", 0))
        start, content = 0, found[0]
        while (end := self._end(start, content)) is not None:
            start = end
        return start + len(self.text[start:content]) - len(self.text[start:content].lstrip()) if start else 0

    def _render(self, count: int) -> str:
        return self._rendered(self.messages[:count]) if count else ""

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self.tokenizer.render(messages, prompt, self.tools, self.variables)

    def _through(self, i: int) -> str:
        if i + 1 == len(self.messages):
            return self.text
        return self._prefix(self._render(i + 1), i, f"message {i} differently when more messages follow")

    def _prefix(self, part: str, i: int, otherwise: str) -> str:
        if not self.text.startswith(part):
            raise RecordProblem(f"the template writes {otherwise}", path=("messages", i))
        return part

    def _end(self, start: int, limit: int) -> int | None:
        """Where the first end-of-turn token of text[start:limit] ends: what users write out is refused or guarded."""
        return self.tokenizer.end_of_turn(self.text, start, limit)

    def _without_blanks(self, start: int, stop: int) -> int:
        """The stop after a last control token that only white space follows; that space is not the model's."""
        last = self.tokenizer.last_special(self.text, start, stop)
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
        marks = {chr(FIRST_MARK + k % _MARKS): i for k, i in enumerate(wanted)}
        contents = [self.messages[i]["content"] for i in wanted]
        if len(marks) < len(wanted) or any(not content or str.isspace(content) for content in contents):
            return None
        messages = list(self.messages)
        for mark, i in marks.items():
            messages[i] = {**messages[i], "content": _with_mark(messages[i]["content"], mark)}
        try:
            marked = self._rendered(messages)
        except DataError:
            return None
        found = {marks[mark]: marked.find(mark) - k for k, mark in enumerate(marks)}
        unmarked = marked.translate(dict.fromkeys(map(ord, marks)))
        in_order = list(found.values()) == sorted(found.values()) and min(found.values(), default=0) >= 0
        return found if in_order and unmarked == self.text and len(marked) == len(self.text) + len(marks) else None


def _with_mark(content: str, mark: str) -> str:
    """The content with a mark before its first character that is no white space: templates trim."""
    if isinstance(content, TemplateSpy):
        return content.with_mark(mark)
    blank = len(content) - len(content.lstrip())
    return content[:blank] + mark + content[blank:]
