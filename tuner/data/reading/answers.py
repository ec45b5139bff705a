"""A prompt and the answers to it, in every form that records write them in, and answers that are compared.

The prompt is a key of its own (`prompt`, `conversations`, `instruction`, `messages`) or what both answers begin with:
the longest run of equal messages, or of equal text up to a space. What the assistant says after it is the answer.
A chosen and a rejected answer, or one with a label, are compared: everything said after the prompt is learned.
"""

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tuner.data.reading import forms
from tuner.data.reading.columns import key_names, turns_in
from tuner.data.reading.examples import Answered, Conversation, Labelled, Message, Pair, PromptCompletion, Record
from tuner.data.reading.problems import RecordProblem

PROMPTS = {
    "prompt_completion": "prompt", "sharegpt": "conversations", "alpaca": "instruction", "messages": "messages",
}  # fmt: skip
"""Form -> where it has its prompt; of a record whose form is not named the first of them counts."""

_Answer = str | list[Message]


class RecordPrompt(NamedTuple):
    """What is answered, and the key that it stands under."""

    key: str | None
    given: _Answer | None


def compared_answers(value: Record, keys: Sequence[str], format: str) -> list[Answered]:  # noqa: A002 (the recipe's word)
    """The prompt with each of the answers at `keys`; `format` names the form of the prompt. RecordProblem."""
    prompt, answers = _parts(value, keys, format)
    if isinstance(answers[0], str):
        _refuse_equal(answers, keys)
        return [PromptCompletion(str(prompt.given), str(text)) for text in answers]
    return [joined(value, prompt, list(said), key) for key, said in zip(keys, answers, strict=True)]  # type: ignore[arg-type]


def learned_answer(value: Record, key: str, other: str | None, format: str) -> Answered:  # noqa: A002 (as above)
    """The prompt with the answer at `key`, which alone is learned. RecordProblem.

    Where the record has no prompt of its own, or repeats it in the answer, it is what this answer and the one at
    `other` begin with.
    """
    prompt, answers = _parts(value, (key,) if other is None else (key, other), format, learned=True)
    answer = answers[0]
    if isinstance(answer, str):
        return PromptCompletion(str(prompt.given), answer)
    forms.refuse_empty(answer, (key,))
    given = prompt.given if isinstance(prompt.given, list) else []
    before = [{"train": False, **message} for message in given]
    return forms.conversation(value, [*before, *answer])


def _parts(
    value: Record, keys: Sequence[str], format: str, learned: bool = False  # noqa: A002 (the recipe's word)
) -> tuple[RecordPrompt, Sequence[_Answer]]:
    """The prompt, a text or messages, and each answer to it in the same form; of one that is learned that alone."""
    prompt = _prompt(value, format)
    answers = [_answer(value, key, format == "sharegpt") for key in keys[: 1 if learned else None]]
    if learned and len(keys) > 1 and (prompt.key is None or _is_whole(answers[0])):
        answers.append(_answer(value, keys[1], format == "sharegpt"))
    if prompt.key in {None, "messages"}:
        answers = _after_chat(answers)
    texts = [answer for answer in answers if isinstance(answer, str)]
    if texts and len(texts) < len(answers):
        raise RecordProblem(f"of {' and '.join(keys)} one is a text and one a list of messages", path=(keys[1],))
    for key, text in zip(keys, texts, strict=False):
        if not text.strip():
            raise RecordProblem(f"{key} is empty", path=(key,))
    if texts and not isinstance(prompt.given, list):
        if prompt.given is None:
            _refuse_equal(texts, keys)
            prompt, texts = _shared_text(value, texts, keys)
        if isinstance(value.get("system"), str) and value["system"].strip():
            raise RecordProblem("system has no place next to a prompt that is text and no turn", path=("system",))
        return prompt, texts
    said = [[forms.said_by("assistant", text)] for text in texts] or [list(answer) for answer in answers]  # type: ignore[arg-type]
    if not learned:
        _refuse_equal(said, keys)
    if not texts:
        prompt, said = _after_prompt(value, prompt, said, keys)
    for key, messages in zip(keys, said, strict=False):
        check_said(messages, key)
    return prompt, said


def _after_chat(answers: list[_Answer]) -> list[_Answer]:
    """A text next to a whole conversation, as ms-swift writes pairs: it answers what the last answer of that does."""
    chats = [answer for answer in answers if not isinstance(answer, str)]
    if len(chats) != 1 or len(answers) != 2 or not _is_whole(chats[0]):
        return answers
    before = chats[0][: _equal_messages(chats)]
    return [[*before, forms.said_by("assistant", each)] if isinstance(each, str) else each for each in answers]


def _is_whole(answer: _Answer) -> bool:
    """Whether an answer begins with its prompt."""
    return not isinstance(answer, str) and answer[0]["role"] != "assistant"


def _prompt(value: Record, format: str) -> RecordPrompt:  # noqa: A002 (the recipe's word)
    key = _prompt_key(value, format)
    if key is None:
        return RecordPrompt(None, None)
    if key == "instruction":
        return RecordPrompt(key, forms.alpaca_question(value))
    given = value[key]
    if key == "prompt" and isinstance(given, dict):
        return RecordPrompt(key, _one_message(key, given, format == "sharegpt"))
    if key == "prompt" and (not isinstance(given, (str, list)) or (isinstance(given, str) and turns_in(given) is None)):
        return RecordPrompt(key, forms.check_string(given, (key,)))
    return RecordPrompt(key, forms.turns_of(value, key, format == "sharegpt"))


def _answer(value: Record, key: str, by_speaker: bool) -> _Answer:
    """A text, or the messages of an answer: one by itself, or a list."""
    given = value[key]
    if isinstance(given, str) and turns_in(given) is None:
        return given
    if isinstance(given, dict):
        return _one_message(key, given, by_speaker)
    if not isinstance(given, (str, list)):
        raise RecordProblem(f"{key} is a text or a list of messages, got {forms.type_name(given)}", path=(key,))
    return forms.turns_of(value, key, by_speaker)


def _one_message(key: str, given: Mapping[str, Any], by_speaker: bool) -> list[Message]:
    """A message by itself."""
    try:
        return forms.turns_of({key: [given]}, key, by_speaker)
    except RecordProblem as problem:
        path = (key, *problem.path[2:])
        raise RecordProblem(problem.reason, problem.col, path, problem.hint) from problem


def _refuse_equal(answers: Sequence[Any], keys: Sequence[str]) -> None:
    if len(answers) == 2 and answers[0] == answers[1]:
        raise RecordProblem(f"{keys[0]} and {keys[1]} are equal", path=(keys[1],))


def _shared_text(value: Record, texts: list[str], keys: Sequence[str]) -> tuple[RecordPrompt, list[str]]:
    """What texts begin with, up to a space before a word in which they differ, and the rest of each."""
    shared = os.path.commonprefix(texts) if len(texts) > 1 else ""
    stop = len(shared)
    while stop and not shared[stop - 1].isspace():
        stop -= 1
    prompt = shared[:stop].rstrip()
    _refuse_unread(value, [prompt], keys)
    if not prompt:
        what = f"{' and '.join(keys)} do not begin with the same words" if len(texts) > 1 else f"{keys[0]} has none"
        raise RecordProblem(f"no prompt: {what}", path=(keys[0],))
    return RecordPrompt(None, prompt), [text[len(prompt) :] for text in texts]


def _refuse_unread(value: Record, prompt: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse a prompt taken from the answers where a key of another name has one that is no part of it."""
    for key, item in value.items():
        if key in keys or key in {"tools", "margin"}:
            continue
        turns = turns_in(item)
        asks = key.lower() in key_names().asking and type(item) is str and len(item.split()) > 1
        said = texts_of(item) if turns is not None else [item] if asks else []
        if not all(any(text.strip() in part for part in prompt) for text in said):
            raise RecordProblem(f"no prompt: {key} is not read, and {' and '.join(keys)} do not repeat it", path=(key,))


def texts_of(item: Any) -> list[str]:
    """The texts in a list of turns or messages."""
    messages = forms.turns_of({"messages": item}, "messages", by_speaker=True)
    return [str(message["content"]) for message in messages if message["role"] in {"system", "user"}]


def _after_prompt(
    value: Record, prompt: RecordPrompt, said: list[list[Message]], keys: Sequence[str]
) -> tuple[RecordPrompt, list[list[Message]]]:
    """The messages of the prompt, and of each answer what follows it where it repeats it."""
    whole = [_is_whole(messages) for messages in said]
    given = prompt.given
    if not any(whole):
        if given is None:
            _refuse_unread(value, (), keys)
            raise RecordProblem(f"no prompt: {' and '.join(keys)} begin with an answer", path=(keys[0],))
        return RecordPrompt(prompt.key, [forms.said_by("user", given)] if isinstance(given, str) else given), said
    if isinstance(given, list) and prompt.key != "messages":
        shared = len(given)
        agrees = all(messages[:shared] == given for messages in said)
    else:
        shared = _equal_messages(said)
        agrees = not isinstance(given, str) or any(
            str(message["content"]).strip() == given.strip() for message in said[0][:shared]
        )
    if not agrees:
        raise RecordProblem(f"{keys[-1]} does not repeat the {prompt.key} that it is an answer to", path=(keys[-1],))
    for key, messages in zip(keys, said, strict=False):
        if len(messages) == shared:
            raise RecordProblem(f"{key} is empty: it has no message after the prompt", path=(key,))
        if messages[shared]["role"] != "assistant":
            reason = f"the prompts of {' and '.join(keys)} differ" if len(keys) > 1 else f"{key} begins with no answer"
            what = "what follows the shared messages is not the assistant's"
            raise RecordProblem(f"{reason}: {what}", path=(key, shared))
    if given is None:
        _refuse_unread(value, [str(message["content"]) for message in said[0][:shared]], keys)
    return RecordPrompt(prompt.key, said[0][:shared]), [messages[shared:] for messages in said]


def _equal_messages(said: list[list[Message]]) -> int:
    """How many messages all of them begin with; of one alone, all up to the last that is no answer."""
    if len(said) == 1:
        return max((i + 1 for i, message in enumerate(said[0]) if message["role"] in {"system", "user"}), default=0)
    equal = [all(message == both[0] for message in both) for both in zip(*said, strict=False)]
    return next((i for i, same in enumerate(equal) if not same), len(equal))


def check_said(answer: Sequence[Message], key: str) -> None:
    """Refuse an answer in which no word and no tool call of the assistant. RecordProblem."""
    if all(forms.is_silent(message) for message in answer if message["role"] == "assistant"):
        raise RecordProblem(f"{key} is empty: no word and no tool call of the assistant", path=(key,))


def joined(value: Record, prompt: RecordPrompt, answer: list[Message], key: str) -> Conversation:
    """A conversation of prompt and answer, of which the assistant's messages in the answer are trained."""
    given = prompt.given if isinstance(prompt.given, list) else []
    for part, place, trains in ((given, prompt.key or key, False), (answer, key, True)):
        for message in part:
            if "train" in message and message["train"] != (trains and message["role"] == "assistant"):
                what = "what the assistant says after the prompt is trained, and nothing else"
                raise RecordProblem(f"train or weight of a message contradicts: {what}", path=(place,))
    plain = [{name: item for name, item in message.items() if name != "train"} for message in (*given, *answer)]
    made = forms.conversation(value, plain)
    # The last answer is trained by the method's rule; the flags say it of those before it.
    said = [i for i, message in enumerate(made.messages) if message["role"] == "assistant"][:-1]
    first = len(made.messages) - len(answer)
    flags = [True if i >= first and i in said else None for i in range(len(made.messages))]
    return made._replace(train=flags)


SIDES = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
"""Keys of a chosen and a rejected answer."""
LABELS = ("label", "kto_tag")
"""Keys of whether an answer is wanted."""
SCORES = ("score_chosen", "score_rejected")
_LABELS_AS_TEXT = {"true": True, "1": True, "false": False, "0": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LARGEST = 3.4028234e38
"""A margin is kept as a number of 32 bits."""


def sides_of(value: Record) -> tuple[str, str] | None:
    """The keys of both answers; None where a record has not both."""
    return next((keys for keys in SIDES if all(value.get(key) is not None for key in keys)), None)


def label_key(value: Record) -> str | None:
    """The key of the label, whatever its value; None where a record has none."""
    return next((key for key in LABELS if value.get(key) not in (None, "")), None)


def pair_of(value: Record, keys: tuple[str, str], format: str) -> Pair:  # noqa: A002 (the recipe's word)
    """Return the two answers at `keys` and their prompt; `format` names the form of the prompt. RecordProblem."""
    _check_form(format)
    chosen, rejected = compared_answers(value, keys, format)
    return Pair(chosen, rejected, _margin(value))


def labelled_of(value: Record, key: str, format: str) -> Labelled:  # noqa: A002 (the recipe's word)
    """Return the answer of a record with the label at `key`. RecordProblem."""
    _check_form(format)
    label = value[key]
    found = _LABELS_AS_TEXT.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(found, (bool, int)) or found not in (0, 1):
        raise RecordProblem(f"{key} is true or false, got {_shown(label)}", path=(key,))
    for form, answer in (("prompt_completion", "completion"), ("alpaca", "output")):
        if format in {"auto", form} and value.get(answer) is not None and value.get(PROMPTS[form]) is not None:
            return Labelled(compared_answers(value, (answer,), form)[0], bool(found))
    for form in ("messages", "sharegpt"):
        if format in {"auto", form} and (place := _prompt_key(value, form)) is not None:
            return Labelled(_last_answer(value, place, format), bool(found))
    raise RecordProblem("no messages, conversations, prompt + completion or instruction + output next to the label", 1)


def _check_form(format: str) -> None:  # noqa: A002 (the recipe's word)
    if format != "auto" and format not in PROMPTS:
        raise RecordProblem(f"rows of format {format} have no answers to a prompt", 1, hint="format: auto")


def _prompt_key(value: Record, format: str) -> str | None:  # noqa: A002 (the recipe's word)
    """Where a record has its prompt or its turns; the form sharegpt reads messages too."""
    keys = {"auto": [*PROMPTS.values()], "sharegpt": [PROMPTS["sharegpt"], "messages"]}.get(format) or [PROMPTS[format]]
    return next((key for key in keys if value.get(key) is not None), None)


def _last_answer(value: Record, key: str, format: str) -> Conversation:  # noqa: A002 (the recipe's word)
    """The conversation of which the last message is the answer."""
    messages = forms.turns_of(value, key, by_speaker=format == "sharegpt")
    prompt, answer = messages[:-1], messages[-1:]
    if answer[0]["role"] != "assistant":
        raise RecordProblem(f"the last message of {key} is no answer of the assistant", path=(key, len(prompt)))
    if not prompt:
        raise RecordProblem(f"{key} has no prompt before the answer", path=(key,))
    check_said(answer, key)
    return joined(value, RecordPrompt(key, prompt), answer, key)


def _margin(value: Record) -> float | None:
    if value.get("margin") not in (None, ""):
        return _number(value, "margin")
    if any(value.get(key) in (None, "") for key in SCORES):
        return None
    return _checked(_number(value, SCORES[0]) - _number(value, SCORES[1]), SCORES[0])


def _number(value: Record, key: str) -> float:
    """A finite number, which a CSV file has as text."""
    number = value[key]
    if isinstance(number, str) and _NUMBER.fullmatch(number.strip()):
        number = float(number)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise RecordProblem(f"{key} is a number, got {_shown(number)}", path=(key,))
    return _checked(number, key)


def _checked(number: float, key: str) -> float:
    if not -_LARGEST <= number <= _LARGEST or math.isnan(number):
        raise RecordProblem(f"{key} is too large for a number of 32 bits", path=(key,))
    return float(number)


def _shown(value: Any) -> str:
    return f"{value}" if isinstance(value, (int, float)) and not isinstance(value, bool) else forms.type_name(value)
