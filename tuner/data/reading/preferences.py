"""Records that compare answers: a chosen and a rejected one to the same prompt, or one with a label.

Everything an assistant says after the prompt is learned.
"""

import math
import re
from typing import Any

from tuner.data.reading.answers import PROMPTS, Prompt, check_said, compared_answers, joined
from tuner.data.reading.examples import Conversation, Labelled, Pair, Record
from tuner.data.reading.forms import turns_of
from tuner.data.reading.messages import type_name
from tuner.data.reading.problems import RecordProblem

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
        if format in {"auto", form} and (place := _turns_key(value, form)) is not None:
            return Labelled(_last_answer(value, place, format), bool(found))
    raise RecordProblem("no messages, conversations, prompt + completion or instruction + output next to the label", 1)


def _check_form(format: str) -> None:  # noqa: A002 (the recipe's word)
    if format != "auto" and format not in PROMPTS:
        raise RecordProblem(f"rows of format {format} have no answers to a prompt", 1, hint="format: auto")


def _turns_key(value: Record, form: str) -> str | None:
    """Where a record has its turns; the form sharegpt reads messages too."""
    keys = (PROMPTS[form], "messages") if form == "sharegpt" else (PROMPTS[form],)
    return next((key for key in keys if value.get(key) is not None), None)


def _last_answer(value: Record, key: str, format: str) -> Conversation:  # noqa: A002 (the recipe's word)
    """The conversation of which the last message is the answer."""
    messages = turns_of(value, key, by_speaker=format == "sharegpt")
    prompt, answer = messages[:-1], messages[-1:]
    if answer[0]["role"] != "assistant":
        raise RecordProblem(f"the last message of {key} is no answer of the assistant", path=(key, len(prompt)))
    if not prompt:
        raise RecordProblem(f"{key} has no prompt before the answer", path=(key,))
    check_said(answer, key)
    return joined(value, Prompt(key, prompt), answer, key)


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
    return f"{value}" if isinstance(value, (int, float)) and not isinstance(value, bool) else type_name(value)
