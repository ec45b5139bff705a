"""Examples as text, and where in it each turn lies: proven from the chat template, never by looking for words.

A conversation is one text where every trained answer of it follows the prompt that a model gets for it; else one for
each answer. A record where neither can be shown is refused with the reason.

Some templates have no one text of a conversation in which every answer follows its prompt: they drop the thoughts of
earlier turns, end only the last answer with the token that ends a generation, or put the beginning of a thought into
the prompt. At inference each answer is another call: the messages before it are rendered with the generation prompt,
and the model continues from there. That is the text that is made of one answer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from tuner.data.encoding.chat import FIRST_MARK, NO_END, REWRITTEN, Chat
from tuner.data.encoding.template import NO_VARIABLES, ChatTemplate, EndlessTemplateError, reasoning_of, unless_refused
from tuner.data.encoding.template_spy import has_reserved, plain
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.examples import Conversation, PlainText, PromptCompletion
from tuner.data.reading.problems import KeyPath, RecordProblem
from tuner.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "all"]
SpecialTokens = Literal["refuse", "escape"]

GUARD, BREAK = "\ufdd4", "\ufdd3"
"""GUARDs stand around a control token that a user wrote out, and a BREAK in it, while the text is rendered and cut."""
NOT_SHOWN = "tools not written by the template"
CALLS_AS_TEXT = "tool calls written as text: the template has none"
CALLS_NOT_SHOWN = "tool calls not written by the template"
SHORTENED = "reasoning not written by the template"
CONTENT_NOT_SHOWN = "content that the template leaves out or changes"
FIELD_NOT_SHOWN = "field of a message not written by the template"
AS_PARTS = "contents given to the template as parts: it reads no strings"
_THOUGHT_TAG = re.compile("</?think>")
_WORD = re.compile(r"[^\W_]+")
_CALLED = "the_tool"
_KNOWN_FIELDS = frozenset(
    ("role", "content", "train", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "id")
)
"""Fields with a place of their own in the notes, and those that say which call or message it is."""


class Turn(NamedTuple):
    """Characters [start, stop) of a text, and what is done with their tokens."""

    start: int
    stop: int
    trained: bool
    rule: str
    is_answer: bool


class TurnPlan(NamedTuple):
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
    apart: bool = False
    """Whether prompt and answer are encoded apart where a token of both together would reach over the cut."""
    ends: bool = True
    """Whether a framed text has the end token after it."""


class Plans(NamedTuple):
    """The documents of an example: one, or one for each answer of a conversation."""

    plans: list[TurnPlan]
    by_answer: bool = False
    left_out: tuple[str, ...] = ()
    """The reasons of answers that have no document."""


class Planner:
    """Plans examples for a tokenizer; `train_on` is the recipe's, and `all` for pre-training."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn, special_tokens: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._escapes = special_tokens == "escape"

    def plans(self, example: Conversation | PlainText | PromptCompletion) -> Plans:
        """Return the plans of an example. Raises RecordProblem, and DataError without a chat template."""
        if isinstance(example, Conversation):
            return self.conversation(example, self.readable(example))
        return Plans([self._plan(example)])

    def conversation(self, example: Conversation, messages: list[dict[str, Any]]) -> Plans:
        """Return the plan of a whole conversation, or where it has none one for each answer. Raises RecordProblem.

        `messages` are those of the conversation as the template is to see them.
        """
        try:
            return Plans([self._whole(example, messages)])
        except RecordProblem as problem:
            return self.by_answer(example, messages, problem)

    def by_answer(self, example: Conversation, messages: list[dict[str, Any]], problem: RecordProblem) -> Plans:
        """Return a plan for each trained answer; raises `problem`, which the whole has, where that is no way out."""
        answers = _answers(messages)
        wanted = [i for i, is_wanted in enumerate(self._wanted(example, answers)) if is_wanted]
        if self._train_on == "all" or not wanted or not set(wanted) <= set(answers):
            raise problem
        try:
            self._tokenizer.render(messages, tools=example.tools)
        except DataError:
            raise problem from None  # the template refuses the conversation, not the mask
        plans: list[TurnPlan] = []
        left_out: list[RecordProblem] = []
        for i in wanted:
            try:
                plans.append(self._answer(example, messages[: i + 1]))
            except RecordProblem as refused:
                left_out.append(refused)
        if not plans:
            raise left_out[0]
        return Plans(plans, True, tuple(refused.kind for refused in left_out))

    def _plan(self, example: PlainText | PromptCompletion) -> TurnPlan:
        everything = self._train_on == "all"
        if isinstance(example, PlainText):
            text = self._checked(example.text, ("text",))
            return TurnPlan(text, (), True, "text", framed=True, escaped=GUARD in text, ends=example.ends)
        prompt = self._checked(example.prompt, ("prompt",))
        text, cut = prompt + self._checked(example.completion, ("completion",)), len(prompt)
        if self._tokenizer.find_special(text) is not None:
            raise RecordProblem("prompt and completion together write out a control token", path=("completion",))
        turns = [Turn(0, cut, everything, "prompt", False), Turn(cut, len(text), True, "completion", True)]
        return TurnPlan(text, turns, everything, "start of text", True, GUARD in text, apart=True)

    def _whole(self, example: Conversation, messages: list[dict[str, Any]]) -> TurnPlan:
        chat = Chat(self._tokenizer, messages, example.tools)
        everything = self._train_on == "all"
        answers = _answers(messages)
        wanted = self._wanted(example, answers)
        turns: list[Turn] = []
        try:
            for i, message in enumerate(messages):
                if wanted[i] == everything and i not in answers[-1:]:
                    continue  # nothing here differs from the rest
                try:
                    start, stop = chat.answer(i, answers) if i in answers else chat.turn(i)
                except RecordProblem:
                    if wanted[i] == everything:
                        continue  # only the held-out sample would use it
                    raise
                turns.append(Turn(start, stop, wanted[i], _rule(example, i, message, wanted[i]), i in answers))
            text = chat.text
        except DataError as error:
            raise RecordProblem(error.message, 1) from error
        rule = "all" if everything else "prompt"
        notes = self._notes(chat.notes, example, messages, text)
        # One answer after its own prompt, and nothing after it, is what a model is asked for.
        is_one = len(turns) == 1 and turns[0].is_answer and messages[-1]["role"] == "assistant"
        apart = is_one and not (everything or chat.is_marked or REWRITTEN in notes)
        return TurnPlan(text, turns, everything, rule, False, GUARD in text, notes, apart)

    def _answer(self, example: Conversation, messages: list[dict[str, Any]]) -> TurnPlan:
        """The plan of the last of `messages` as it is written at its turn. RecordProblem."""
        answer = write_answer(self._tokenizer, messages, example.tools)
        rule = _rule(example, len(messages) - 1, messages[-1], True)
        turns = [Turn(answer.start, answer.stop, True, rule, True)]
        # Those of others and the answer itself, of which the document shows all.
        own = [*(message for message in messages[:-1] if message["role"] != "assistant"), messages[-1]]
        notes = self._notes(answer.notes, example, own, answer.text)
        return TurnPlan(answer.text, turns, False, "prompt", False, GUARD in answer.text, notes, apart=True)

    def _wanted(self, example: Conversation, answers: list[int]) -> list[bool]:
        by_rule = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(example.messages))}
        rule = set(by_rule[self._train_on])
        return [i in rule if own is None else own for i, own in enumerate(example.train)]

    def readable(self, example: Conversation) -> list[dict[str, Any]]:
        """The messages as the template can write them, with written-out control tokens refused or guarded."""
        template, messages = self._tokenizer.template_for(example.tools), []
        has_calls = any(message.get("tool_calls") for message in example.messages)
        as_text = has_calls and not has_place_for_calls(template)
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
            raise RecordProblem("a noncharacter (U+FDD0 to U+FDEF) is no text", path=path)
        found = self._tokenizer.find_special(text)
        if found is None:
            return text
        if self._escapes:
            return self._tokenizer.change_specials(text, lambda token: f"{GUARD}{token[0]}{BREAK}{token[1:]}{GUARD}")
        raise _written_out(found[0], path)

    def _notes(
        self, found: Sequence[str], example: Conversation, messages: Sequence[Mapping[str, Any]], text: str
    ) -> tuple[str, ...]:
        unwritten = notes_of(example, self._tokenizer.template_for(example.tools), messages, text)
        return tuple(dict.fromkeys([*found, *unwritten]))


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _rule(example: Conversation, i: int, message: Mapping[str, Any], wanted: bool) -> str:
    """Why message i is trained or not."""
    return f"{message['role']} turn" if example.train[i] is None else f"train: {str(wanted).lower()}"


def _written_out(token: str, path: KeyPath) -> RecordProblem:
    """The problem of a control token in somebody's text. Tools are never escaped: there is no setting for them."""
    hint = None if path[0] == "tools" else "tokenizer.special_tokens_in_text: escape"
    return RecordProblem(f"the control token {token} appears literally in the text", path=path, hint=hint)


def _call_as_text(message: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    """The message with its tool calls as JSON lines in the content."""
    calls = [call.get("function", call) for call in message["tool_calls"]]
    if any("name" not in call for call in calls):
        raise RecordProblem("a tool call has a name", path=(*path, "tool_calls"))
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


@lru_cache(8)
def has_place_for_calls(template: ChatTemplate) -> bool:
    """Whether a template writes tool calls; one that refuses those that are tried, for their ids say, may write others.

    They are tried with a tool and without: some read them only then.
    """
    if "tool_calls" not in template.source:
        return False
    call = {"type": "function", "id": "call12345", "function": {"name": _CALLED, "arguments": {"key": "value"}}}
    other = {"name": "other", "description": "Another", "parameters": {"type": "object", "properties": {}}}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
    tools = (None, [{"type": "function", "function": other}])
    try:
        texts = [unless_refused(partial(template.render, tools=each), chat, False) for each in tools]
    except EndlessTemplateError:
        return True  # which each chat is refused for
    return any(text is None or _CALLED in text for text in texts)


def notes_of(
    example: Conversation, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], text: str
) -> list[str]:
    """What a `text` of the template lacks of `messages`, which are those of the example before calls became text."""
    notes = []
    if example.tools and "tools" not in template.source.replace("tool_calls", ""):
        notes.append(NOT_SHOWN)
    if template.reads_parts:
        notes.append(AS_PARTS)
    if any(message.get("tool_calls") for message in example.messages) and not has_place_for_calls(template):
        notes.append(CALLS_AS_TEXT)
    for message in messages:
        notes += _missing(message, text)
    if NOT_SHOWN not in notes and _lacks_calls(messages, example.tools or (), text):
        notes.append(CALLS_NOT_SHOWN)
    return notes


def _lacks_calls(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a name stands in the text less often than it is called, and once more where the tool is declared."""
    calls = Counter(str(call.get("function", call).get("name")) for m in messages for call in m.get("tool_calls") or ())
    declared = {tool.get("function", tool).get("name") for tool in tools}
    return any(text.count(name) < count + (name in declared) for name, count in calls.items())


def _missing(message: Mapping[str, Any], text: str) -> Iterator[str]:
    content, thought = message.get("content"), reasoning_of(message)
    if isinstance(thought, str) and not _stands(thought, text):
        yield SHORTENED
    if isinstance(content, str) and not _stands(plain(content), text):
        *thoughts, answer = _THOUGHT_TAG.split(plain(content))
        if not _stands(answer, text):
            yield f"{CONTENT_NOT_SHOWN}: {message['role']}"
        elif not all(_stands(part, text) for part in thoughts):
            yield SHORTENED
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if not all(_words_stand([call.get("name"), call.get("arguments")], text) for call in calls):
        yield CALLS_NOT_SHOWN
    others = sorted(key for key in message.keys() - _KNOWN_FIELDS if not _words_stand(message[key], text))
    yield from (f"{FIELD_NOT_SHOWN}: {key}" for key in others)


def _stands(words: str, text: str) -> bool:
    """Whether words stand in a text, but for white space around them; as they are, or as a JSON string has them."""
    words = words.strip()
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


def _words_stand(value: Any, text: str) -> bool:
    """Whether every word of a JSON value stands in a text; templates write its punctuation in many ways."""
    if isinstance(value, str):
        return value in text or all(word in text for word in _WORD.findall(value))
    if isinstance(value, dict):
        return all(key in text and _words_stand(item, text) for key, item in value.items())
    return not isinstance(value, list) or all(_words_stand(item, text) for item in value)


NO_THOUGHT = "answers without reasoning after a prompt that opens a thought: trained with an empty one"
OWN_THOUGHT = "reasoning written into answers after a prompt that opens a thought: the template has no place for it"
_OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>(\n*)\Z")


class EncodedAnswer(NamedTuple):
    """A prompt and the answer after it: characters [start, stop) of the text are the answer with its end of turn."""

    text: str
    start: int
    stop: int
    notes: tuple[str, ...]


def write_answer(tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: Any) -> EncodedAnswer:
    """Return the last of `messages` after its prompt. Raises RecordProblem where the template writes it after none.

    The prompt is the plain generation prompt where the template writes the answer so that it continues from there. Else
    it is that of a caller who asks for thoughts, or for none (`enable_thinking`), where the template lets them. Else,
    where the plain prompt opens a thought that the template drops from answers, the thought is closed first.
    """
    refused: RecordProblem | None = None
    for variables in _callers(tokenizer.template_for(tools)):
        chat = Chat(tokenizer, messages, tools, variables)
        try:
            answer = _continued(chat)
        except RecordProblem as problem:
            refused = refused or problem
        except DataError as error:
            refused = refused or RecordProblem(error.message, 1)
        else:
            asked = [f"answers after the prompt of {name}={str(value).lower()}" for name, value in variables.items()]
            return answer._replace(notes=(*answer.notes, *asked))
    closed = _after_open_thought(tokenizer, messages, tools)
    if closed is not None:
        return closed
    last = ("messages", len(messages) - 1)
    raise refused or RecordProblem("no prompt of the template leads to the answer", path=last)


def _callers(template: ChatTemplate) -> Iterator[Mapping[str, Any]]:
    """What callers may tell the template about thoughts, the one who says nothing first."""
    yield NO_VARIABLES
    if template.has_generation_marks:
        return
    for name in template.thinking_variables:
        yield {name: False}
        yield {name: True}


def _continued(chat: Chat) -> EncodedAnswer:
    """The prompt and what the template writes of the answer after it. RecordProblem, DataError."""
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    last = answers[-1]
    prompt = chat.prompt(last)
    known = None if chat.text.startswith(prompt) else chat.turn_start(last)
    start, stop = chat.answer(last, answers, known)
    if chat.is_marked:
        # The marks say where the answer ends; what a model is prompted with is the prompt, marked or not.
        if not chat.text.startswith(prompt) or not start <= len(prompt) <= stop:
            reason = f"the template marks message {last} where its prompt does not end"
            raise RecordProblem(reason, path=("messages", last))
        start = len(prompt)
    # What stands before the answer is the prompt, though the template may write it otherwise with an answer after it.
    notes = tuple(note for note in chat.notes if note != REWRITTEN)
    return EncodedAnswer(prompt + chat.text[start:], len(prompt), len(prompt) + stop - start, notes)


def _after_open_thought(tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: Any) -> EncodedAnswer | None:
    """The answer with its thought, or an empty one, where the prompt opens a thought and the template drops it.

    The templates of DeepSeek's R1 and its distillates: `<think>` ends the prompt, and all up to `</think>` is cut from
    an answer. None where this is no such template, or where it writes more or less than the answer's words.
    """
    chat = Chat(tokenizer, messages, tools)
    try:
        prompt, whole = chat.prompt(len(messages) - 1), chat.text
        opened = None if chat.is_marked else _OPEN_THOUGHT.search(prompt)
        around = None if opened is None else _around(tokenizer, messages, tools, whole)
    except DataError:
        return None
    if opened is None or around is None or around.head != prompt[: opened.start()]:
        return None
    thought, answer, rest = _after(messages[-1], opened[0], opened[1], opened[2])
    if around.words.strip() != plain(answer).strip() and not around.calls:
        return None
    text = prompt + rest
    words = len(text)
    text += around.words + around.tail if around.calls else around.tail
    stop = tokenizer.end_of_turn(text, words, len(text))
    notes = [OWN_THOUGHT if thought else NO_THOUGHT]
    if stop is None:
        notes.append(NO_END)
        stop = len(text) if around.calls else words
    return EncodedAnswer(text, len(prompt), stop, tuple(notes))


class _Around(NamedTuple):
    """What a template writes of the last message, and before and after that."""

    head: str
    words: str
    tail: str
    calls: bool = False
    """Whether the words are tool calls, and there is no content."""


def _around(tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: Any, whole: str) -> _Around | None:
    """Find them in the `whole` text by a mark in the place of the content. DataError."""
    last, mark = messages[-1], chr(FIRST_MARK)
    marked = tokenizer.render([*messages[:-1], {**last, "content": mark}], False, tools)
    head, _, tail = marked.partition(mark)
    if mark in tail or not whole.startswith(head):
        return None
    if last.get("tool_calls") and not plain(last["content"]).strip():
        return _Around(head, whole[len(head) :], "", True)
    return _Around(head, whole[len(head) : len(whole) - len(tail)], tail) if whole.endswith(tail) else None


def _after(message: Mapping[str, Any], opening: str, tag: str, space: str) -> tuple[str, str, str]:
    """A message's thought, its answer, and what follows a prompt that ends with `opening`: a tag and white space."""
    content, thought = message["content"], reasoning_of(message)
    answer, closing = content, f"</{tag}>"
    if not isinstance(thought, str) or not thought.strip():
        thought = ""
        if closing in content:
            before, _, answer = content.rpartition(closing)
            thought, answer = before.strip().removeprefix(f"<{tag}>").strip(), answer.lstrip("\n")
        if content.startswith(opening):
            return thought, answer, content[len(opening) :]
    written = f"{thought.strip()}{space}" if thought or space else ""
    return thought, answer, f"{written}{closing}{space * 2}{answer}"
