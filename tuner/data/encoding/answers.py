"""One answer as a model writes it at its turn: what it is prompted with, and the answer as the template writes it.

Some templates have no one text of a conversation in which every answer follows the prompt that a model gets for it:
they drop the thoughts of earlier turns, end only the last answer with the token that ends a generation, or put the
beginning of a thought into the prompt. At inference each answer is another call: the messages before it are rendered
with the generation prompt, and the model continues from there. That is the text made here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tuner.data.encoding.chat import FIRST_MARK, NO_END, REWRITTEN, Chat
from tuner.data.encoding.template import NO_VARIABLES, ChatTemplate, reasoning_of
from tuner.data.encoding.template_spy import plain
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.problems import RecordProblem
from tuner.errors import DataError

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


def own_words(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of which an answer's document shows all: those of others, and the answer itself, the last one."""
    return [m for m in messages[:-1] if m["role"] != "assistant"] + [messages[-1]]
