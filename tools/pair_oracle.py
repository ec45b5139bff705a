"""Whether a row compares answers, and the texts that become of it, judged apart from the product.

Nothing of `tuner` is imported here. What is wrong with a row is a set: a row with two faults may be refused for either.
Of a good row come the texts of its documents as the ChatML template writes them, each with the parts that are trained.
What makes a row good is docs/data-formats.md.
"""

import json
import math
from typing import Any, NamedTuple

from tools.row_oracle import Bad, call_good, from_text, good_json, holds_turns, tools_good, turn_good

BEGIN, END = "<|bos|>", "<|eos|>"
PROMPTS = ("prompt", "conversations", "instruction", "messages")
SPEAKERS = {"human": "user", "user": "user", "system": "system"} | dict.fromkeys(
    ("observation", "tool", "function_response"), "tool"
)
Part = tuple[str, bool]
"""A text, and whether it is trained."""


class Said(NamedTuple):
    """A message: what is written of it, all by which it is told from another, and the wish to train it."""

    role: str
    text: str
    identity: str
    wish: bool | None
    silent: bool
    """Whether it has no word, no thought and no call."""


class Verdict(NamedTuple):
    """What is wrong with a row, or the documents that become of it."""

    faults: frozenset[str]
    documents: list[list[Part]]
    margin: float | None = None
    label: bool | None = None


class Judge:
    """Collects what is wrong with one row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.faults: set[str] = set()

    def preference(self) -> Verdict:
        """Two answers to one prompt."""
        sides = [("chosen", "rejected"), ("chosen_messages", "rejected_messages")]
        keys = next((both for both in sides if all(self.row.get(key) is not None for key in both)), None)
        self.media()
        if keys is None:
            return self.refused("other method")
        key = next((key for key in PROMPTS if self.row.get(key) is not None), None)
        margin = self.margin()
        return self.judged(key, [self.answer(side) for side in keys], margin=margin)

    def unpaired(self) -> Verdict:
        """One answer and its label."""
        row = self.row
        self.media()
        key = next((key for key in ("label", "kto_tag") if row.get(key) not in (None, "")), None)
        if key is None:
            return self.refused("other method")
        given = row[key].strip().lower() if isinstance(row[key], str) else row[key]
        if given not in [0, 1, "true", "false", "1", "0"] or isinstance(given, float):
            return self.refused("label")
        label = given in [1, "true", "1"]
        for prompt, answer in (("prompt", "completion"), ("instruction", "output")):
            if row.get(prompt) is not None and row.get(answer) is not None:
                return self.judged(prompt, [self.answer(answer)], label=label)
        place = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
        if place is None:
            return self.refused("no answer")
        turns = self.turns(place, row[place])
        if turns is None:
            return self.refused("schema")
        if turns[-1].role != "assistant":
            self.faults.add("no answer")
        if len(turns) < 2:
            self.faults.add("no prompt")
        if turns[-1].silent:
            self.faults.add("empty")
        return self.finished(place, turns[:-1], [turns[-1:]], None, label)

    def asked_elsewhere(self, prompt: list[str]) -> bool:
        """Whether a key that is not read asks something that a prompt taken from the answers lacks."""
        asked = [self.row[name] for name in ("question", "query", "input") if isinstance(self.row.get(name), str)]
        return any(len(text.split()) > 1 and not any(text.strip() in part for part in prompt) for text in asked)

    def refused(self, fault: str) -> Verdict:
        """The verdict of what cannot be looked at further."""
        return Verdict(frozenset({*self.faults, fault}), [])

    def media(self) -> None:
        if type(self.row.get("train")) in (bool, int, float) and self.row["train"] != 1:
            self.faults.add("schema")
        if any(self.row.get(kind) or self.row.get(f"{kind}s") for kind in ("image", "audio", "video")):
            self.faults.add("media")

    def margin(self) -> float | None:
        row = self.row
        if row.get("margin") not in (None, ""):
            return self.number(row["margin"])
        scores = [row.get("score_chosen"), row.get("score_rejected")]
        if any(score in (None, "") for score in scores):
            return None
        chosen, rejected = map(self.number, scores)
        return None if chosen is None or rejected is None else self.number(chosen - rejected)

    def number(self, value: Any) -> float | None:
        found = value
        if isinstance(value, str):
            try:
                found = float(value) if not {"_", "n", "N"} & set(value) else None
            except ValueError:
                found = None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            self.faults.add("margin")
            return None
        if abs(found) > 3.4028234e38:
            self.faults.add("margin")
            return None
        return float(found)

    def answer(self, key: str) -> str | list[Said] | None:
        given = self.row[key]
        if isinstance(given, str) and not holds_turns(given):
            if not given.strip():
                self.faults.add("empty")
            return given
        return self.turns(key, [given] if isinstance(given, dict) else given)

    def turns(self, key: str, given: Any) -> list[Said] | None:
        items = from_text(given)
        if items == []:
            self.faults.add("empty")
            return None
        if not isinstance(items, list) or not all(turn_good(item, key == "conversations") for item in items):
            self.faults.add("schema")
            return None
        return [said(item) for item in items]

    def prompt(self, key: str | None) -> str | list[Said] | None:
        if key is None:
            return None
        given = self.row[key]
        if key == "instruction":
            return self.question()
        if key == "prompt" and isinstance(given, str) and not holds_turns(given):
            return given
        if key == "prompt" and not isinstance(given, (str, list, dict)):
            self.faults.add("schema")
            return None
        return self.turns(key, [given] if isinstance(given, dict) and key == "prompt" else given)

    def question(self) -> list[Said] | None:
        row = self.row
        history = from_text(row.get("history")) if row.get("history") else []
        asked = [row["instruction"], "" if row.get("input") is None else row["input"]]
        pairs = isinstance(history, list) and all(
            isinstance(pair, list) and [type(words) for words in pair] == [str, str] for pair in history
        )
        if not pairs or not all(isinstance(words, str) for words in asked) or "".join(asked) == "":
            self.faults |= set() if pairs and all(isinstance(words, str) for words in asked) else {"schema"}
            self.faults |= {"empty"} if all(words == "" for words in asked) else set()
            return None
        before = [
            plain(role, words) for pair in history for role, words in zip(("user", "assistant"), pair, strict=True)
        ]
        return [*before, plain("user", "\n".join(words for words in asked if words))]

    def judged(
        self,
        key: str | None,
        answers: list[Any],
        margin: float | None = None,
        label: bool | None = None,
    ) -> Verdict:
        """The verdict of answers to the prompt at a key."""
        prompt = self.prompt(key)
        if None in answers or (key is not None and prompt is None):
            return Verdict(frozenset(self.faults or {"schema"}), [])
        if key in (None, "messages"):
            answers = beside_chat(answers)
        texts = [isinstance(answer, str) for answer in answers]
        if any(texts) and not all(texts):
            return self.refused("kinds")
        if len(answers) == 2 and same(answers[0], answers[1]):
            self.faults.add("equal")
        if all(texts) and not isinstance(prompt, list):
            return self.as_texts(prompt, answers, margin, label)
        if all(texts):
            return self.finished(key, prompt, [[plain("assistant", text)] for text in answers], margin, label)
        return self.as_turns(key, prompt, answers, margin, label)

    def as_texts(self, prompt: Any, answers: list[str], margin: float | None, label: bool | None) -> Verdict:
        """The documents of plain texts."""
        if prompt is None:
            words = 0  # characters in which all agree, up to a blank
            for at, letters in enumerate(zip(*answers, strict=False)):
                if len(set(letters)) > 1:
                    break
                words = at + 1 if letters[0].isspace() else words
            prompt = answers[0][:words].rstrip()
            if not prompt or self.asked_elsewhere([prompt]):
                self.faults.add("no prompt")
            answers = [answer[len(prompt) :] for answer in answers]
        documents: list[list[Part]] = [[(prompt, False), (answer + END, True)] for answer in answers]
        if isinstance(self.row.get("system"), str) and self.row["system"].strip():
            self.faults.add("system")
        self.control(prompt, *answers)
        return Verdict(frozenset(self.faults), documents, margin, label)

    def as_turns(
        self, key: str | None, prompt: Any, answers: list[list[Said]], margin: float | None, label: bool | None
    ) -> Verdict:
        """The documents of answers that are messages, which may repeat the prompt."""
        if all(answer[0].role == "assistant" for answer in answers):
            if prompt is None:
                self.faults.add("no prompt")
            asked = [plain("user", prompt)] if isinstance(prompt, str) else prompt or []
            return self.finished(key, asked, answers, margin, label)
        if isinstance(prompt, list) and key != "messages":
            count = len(prompt)
            if not all(same(answer[:count], prompt) for answer in answers):
                self.faults.add("other prompt")
        elif len(answers) == 1:
            count = max([at + 1 for at, turn in enumerate(answers[0]) if turn.role in ("system", "user")], default=0)
            if isinstance(prompt, str) and prompt.strip() not in [turn.text.strip() for turn in answers[0][:count]]:
                self.faults.add("other prompt")
        else:
            count = 0
            while all(len(answer) > count for answer in answers) and same_all([answer[count] for answer in answers]):
                count += 1
            words = None if not isinstance(prompt, str) else prompt.strip()
            if words is not None and words not in [turn.text.strip() for turn in answers[0][:count]]:
                self.faults.add("other prompt")
        if prompt is None and self.asked_elsewhere([turn.text for turn in answers[0][:count]]):
            self.faults.add("no prompt")
        if any(len(answer) == count for answer in answers):
            self.faults.add("empty")
        if not all(answer[count].role == "assistant" for answer in answers if len(answer) > count):
            self.faults.add("other prompt")
        if any(len(answer) <= count for answer in answers):  # shorter than the prompt, which it does not repeat then
            return Verdict(frozenset(self.faults), [])
        return self.finished(key, answers[0][:count], [answer[count:] for answer in answers], margin, label)

    def finished(
        self,
        key: str | None,
        prompt: list[Said],
        answers: list[list[Said]],
        margin: float | None,
        label: bool | None,
    ) -> Verdict:
        """The documents of a prompt and answers that are known."""
        if not tools_good(self.row):
            self.faults.add("schema")
        if any(all(turn.silent for turn in answer if turn.role == "assistant") for answer in answers):
            self.faults.add("empty")
        if any(turn.wish for turn in prompt) or any(
            turn.wish not in (None, turn.role == "assistant") for answer in answers for turn in answer
        ):
            self.faults.add("wish")
        system = self.row.get("system")
        if system and not isinstance(system, str):
            self.faults.add("schema")
        elif system and (not prompt or prompt[0].role != "system"):
            prompt = [plain("system", system), *prompt]
        elif system and prompt[0].text != system:
            self.faults.add("system")
        self.control(json.dumps(from_text(self.row.get("tools"))) if self.row.get("tools") else "")
        self.control(*(turn.identity for turn in (*prompt, *(turn for answer in answers for turn in answer))))
        if self.faults:
            return Verdict(frozenset(self.faults), [])
        documents = [chatml(prompt, answer) for answer in answers]
        if len(documents) == 2 and documents[0] == documents[1]:
            return self.refused("equal")
        return Verdict(frozenset(), documents, margin, label)

    def control(self, *texts: str) -> None:
        if any(token in text for text in texts for token in (BEGIN, END)):
            self.faults.add("control token")


def beside_chat(answers: list[Any]) -> list[Any]:
    """A text and a whole conversation: the text answers what the last answer of that does."""
    chats = [answer for answer in answers if not isinstance(answer, str)]
    if len(answers) == 2 and len(chats) == 1 and chats[0][0].role != "assistant":
        start = 1 + max(at for at, turn in enumerate(chats[0]) if turn.role in ("system", "user") or at == 0)
        return [[*chats[0][:start], plain("assistant", a)] if isinstance(a, str) else a for a in answers]
    return answers


def judge(row: dict[str, Any], kind: str) -> Verdict:
    """The verdict of a row for a method whose examples are of a kind."""
    return Judge(row).preference() if kind == "preference" else Judge(row).unpaired()


def same(one: Any, other: Any) -> bool:
    """Whether two texts, or two lists of messages, are equal but for wishes to train."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return len(one) == len(other) and all(same_all(both) for both in zip(one, other, strict=True))


def same_all(turns: Any) -> bool:
    """Whether messages are equal, wishes to train included where there are any."""
    return len({(turn.identity, turn.wish) for turn in turns}) == 1


def plain(role: str, text: str) -> Said:
    """A message of words alone."""
    return Said(role, text, json.dumps([role, text, None, [], {}], ensure_ascii=False), None, not text.strip())


def said(turn: dict[str, Any]) -> Said:
    """A good turn of either way of writing."""
    if "role" not in turn:
        role, text, thought, calls, more = SPEAKERS.get(turn["from"], "assistant"), turn["value"], None, [], {}
        if turn["from"] == "function_call":
            found = good_json(text)
            text, calls = "", found if isinstance(found, list) else [found]
    else:
        role = {"developer": "system", "function": "tool"}.get(turn["role"], turn["role"])
        text, thought, calls = content_of(turn)
        known = ("role", "content", "tool_calls", "train", "loss_weight", "weight", "loss", "reasoning_content")
        more = {name: item for name, item in turn.items() if item is not None and name not in known}
        thought = turn.get("reasoning_content") if thought is None else thought
    made = [called(call) for call in calls]
    identity = json.dumps([role, text, thought, made, more], ensure_ascii=False, sort_keys=True)
    wishes = [bool(turn[name]) for name in ("train", "loss_weight", "weight", "loss") if turn.get(name) is not None]
    lines = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments, _ in made]
    silent = not (text.strip() or thought or made)
    written = "\n".join([*([text] if text else []), *lines]) if made else text
    return Said(role, written, identity, wishes[0] if wishes else None, silent)


def content_of(turn: dict[str, Any]) -> tuple[str, str | None, list[Any]]:
    """The words, the thoughts and the calls of a message."""
    calls = turn.get("tool_calls")
    calls = list((good_json(calls) if isinstance(calls, str) else calls) or [])
    content = turn.get("content")
    if not isinstance(content, list):
        return content or "", None, calls
    texts, thoughts = [], []
    for part in content:
        kind = part["type"]
        if kind == "tool_call":
            call = next((part[name] for name in ("value", "tool_call") if part.get(name) is not None), part)
            calls.append(good_json(call) if isinstance(call, str) else call)
            continue
        names = ("text", "value") if kind == "text" else (kind, "text", "value")
        words = next(part[name] for name in names if part.get(name) is not None)
        (texts if kind == "text" else thoughts).append(words)
    return "".join(texts), "".join(thoughts) if thoughts else None, calls


def called(call: dict[str, Any]) -> tuple[str, Any, Any]:
    """Name and arguments of a good call, and what else there is."""
    if not call_good(call):
        raise Bad("call")
    wrapped = isinstance(call.get("function"), dict)
    function = dict(call["function"] if wrapped else call)
    arguments = function.pop("arguments", None) if "arguments" in function else function.pop("parameters", None)
    found = good_json(arguments) if isinstance(arguments, str) else arguments
    arguments = found if isinstance(found, dict) else {} if arguments is None else arguments
    function.pop("parameters" if "arguments" not in (call["function"] if wrapped else call) else "", None)
    rest = {name: item for name, item in call.items() if item is not None and name != "function"} if wrapped else {}
    more = {name: item for name, item in function.items() if name != "name" and (wrapped or name != "type")}
    return function["name"], arguments, [{**rest, "type": rest.get("type", "function")}, more]


def chatml(prompt: list[Said], answer: list[Said]) -> list[Part]:
    """A conversation as ChatML writes it, the assistant's turns after the prompt trained with their ends."""
    parts: list[Part] = [(f"{BEGIN}{turn.role}\n{turn.text}{END}\n", False) for turn in prompt]
    for turn in answer:
        trained = turn.role == "assistant"
        parts += [(f"{BEGIN}{turn.role}\n", False), (turn.text + END, trained), ("\n", False)]
    return parts
