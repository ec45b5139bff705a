"""A talk: what is remembered, what a terminal shows, what a pipe gets, and how it ends."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

from tuner.cli.work.talk import Talk, _ctrl_c_stops_an_answer
from tuner.errors import RecipeError
from tuner.generate import Answer, Generator, Prompt, Sampling


@dataclass
class Echo:
    """Answers with how many messages it was given, in two pieces; `long` is too long, `stop` is stopped."""

    has_template: bool = True
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def generate(self, prompt: Prompt, sampling: Sampling, show: Callable[[str], None] | None = None) -> Answer:
        self.asked.append(tuple(message["content"] for message in prompt.messages))
        if prompt.shown == "long":
            raise RecipeError("the prompt has 9 tokens, the model takes 8")
        text = f"heard\t{len(prompt.messages)}"
        for piece in (text[:3], text[3:]) if show else ():
            assert show is not None
            show(piece)
        if prompt.shown == "stop":
            return Answer("hea", 0, cut=True)
        return Answer(text, 7, cut=prompt.shown == "cut")


def held(lines: list[str], live: bool, **options: Any) -> tuple[Talk, str, list[str]]:
    """A talk over these lines, what it wrote to stdout, and its remarks."""
    shown: list[str] = []
    notes: list[str] = []
    model = cast("Generator", options.pop("model", Echo()))
    talk = Talk(model, Sampling(64), show=shown.append, note=notes.append, live=live, **options)
    talk.hold(iter(lines))
    return talk, "".join(shown), notes


def test_a_pipe_gets_an_answer_for_each_line_and_what_was_said_is_remembered() -> None:
    talk, shown, notes = held(["one", "/quit", "two"], live=False, system="be short")
    assert shown == "heard    2\nheard    4\nheard    6\n", "on a pipe every line is a prompt"
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]
    assert notes == []


def test_a_terminal_takes_commands() -> None:
    model = Echo()
    talk, shown, notes = held(["one", "/reset", "two", "/help", "/what", "/quit", "three"], live=True, model=model)
    assert shown == "heard    1\nheard    1\n"
    assert model.asked == [("one",), ("two",)]
    assert notes[0] == "what was said is forgotten"
    assert "/quit end" in notes[1] and notes[2].startswith("no command /what: /reset")
    assert [message["content"] for message in talk.messages] == ["two", "heard\t1"]


def test_an_answer_that_was_cut_or_stopped_is_marked_and_kept() -> None:
    talk, _, notes = held(["cut", "stop", "more"], live=True)
    assert notes == ["(cut after 7 tokens; --max-new-tokens 128 allows more)", "(stopped)"]
    assert talk.messages[3]["content"] == "hea"


def test_a_talk_that_is_too_long_can_be_reset_in_a_terminal() -> None:
    talk, _, notes = held(["long", "short"], live=True)
    assert notes == ["the prompt has 9 tokens, the model takes 8; /reset forgets what was said"]
    assert [message["content"] for message in talk.messages] == ["short", "heard\t1"]
    with pytest.raises(RecipeError, match="the model takes 8"):
        held(["long"], live=False)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(RecipeError, match="no chat template"):
        held([], live=False, model=Echo(has_template=False))


def test_ctrl_c_stops_an_answer_but_not_what_its_first_one_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_library.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    with _ctrl_c_stops_an_answer():
        assert import_module("slow_library").whole
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
