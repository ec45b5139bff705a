"""A talk with a model, one line after the other."""

import importlib.util
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from tuner.cli.command import Outcome
from tuner.errors import RecipeError
from tuner.generate import Answer, Prompt, Sampling, load_generator
from tuner.runtime.console import Console, escape
from tuner.runtime.stop import is_loading, undone

__all__ = ["COMMANDS", "QUIT", "Sampling", "Talk", "talk_to", "visible"]
COMMANDS = {"/reset": "forget what was said", "/quit": "end (Ctrl-D too)", "/help": "show this"}
QUIT = frozenset({"/quit", "/exit", "/bye"})

Show = Callable[[str], None]


class Answerer(Protocol):
    """Who answers."""

    @property
    def has_template(self) -> bool:
        """Whether it takes messages."""

    def generate(self, prompt: Prompt, sampling: Sampling, show: Show | None = None) -> Answer:
        """The answer; ``show`` gets it piece by piece. Raises RecipeError for a prompt that is too long."""


def nothing(text: str) -> None:
    """For who shows none of it."""


@dataclass
class Talk:
    """A model and what was said so far; ``show`` gets answers for stdout, ``note`` remarks for stderr.

    In a terminal (``live``) answers are shown piece by piece, Ctrl-C ends one, and lines with a / are commands.
    """

    generator: Answerer
    sampling: Sampling
    system: str | None = None
    live: bool = False
    show: Show = nothing
    note: Show = nothing
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.generator.has_template:
            raise RecipeError("the tokenizer has no chat template", hint="use tuner generate MODEL --prompt TEXT --raw")
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but for the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def hold(self, lines: Iterator[str]) -> None:
        """Answer each line until they end, or one says so."""
        for line in lines:
            if self.live and line in QUIT:
                return
            if self.live and line.startswith("/"):
                self._obey(line)
            else:
                self._answer(line)

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self.reset()
            self.note("what was said is forgotten")
            return
        known = "      ".join(f"{name} {text}" for name, text in COMMANDS.items())
        self.note(known if line == "/help" else f"no command {line}: {known}")

    def _answer(self, line: str) -> None:
        said = [*self.messages, {"role": "user", "content": line}]
        piece = (lambda text: self.show(visible(text))) if self.live else None
        try:
            answer = self.generator.generate(Prompt(line, messages=tuple(said)), self.sampling, piece)
        except RecipeError as error:
            if not self.live:
                raise
            self.note(f"{error.message}; /reset forgets what was said")
            return
        self.show("\n" if self.live else f"{visible(answer.text)}\n")
        if answer.cut:
            self.note(cut_at(answer, self.sampling))
        self.messages = [*said, {"role": "assistant", "content": answer.text}]


def talk_to(
    name: str, base: str | None, sampling: Sampling, system: str | None, stdout: int | None, console: Console
) -> Outcome:
    """Load a model and talk with it, as :func:`talk` does."""
    sampling.check()
    with console.doing(f"loading {name}"):
        generator = load_generator(name, base=base, warn=console.warn)
    return talk(generator, sampling, system, stdout)


def talk(generator: Answerer, sampling: Sampling, system: str | None, stdout: int | None) -> Outcome:
    """Talk over stdin; answers go to the descriptor `stdout`, or, where that is None, into the outcome alone."""
    live = stdout is not None and sys.stdin.isatty()

    def show(text: str) -> None:
        if stdout is not None:
            os.write(stdout, text.encode("utf-8", "replace"))

    held = Talk(generator, sampling, system, live, show, lambda text: print(text, file=sys.stderr, flush=True))
    if live:
        held.note("Ctrl-C stops an answer, /quit ends, /reset forgets, /help lists")
    with _ctrl_c_stops_an_answer() if live else nullcontext():
        held.hold(_typed() if live else (line.strip() for line in sys.stdin if line.strip()))
    if stdout is not None:
        raise SystemExit(0)  # everything that stdout is to carry is there already
    text = "\n".join(message["content"] for message in held.messages if message["role"] == "assistant")
    return Outcome(text, artifacts={"messages": held.messages}, is_text=True)


def cut_at(answer: Answer, sampling: Sampling) -> str:
    """What to say of an answer that stopped before its end."""
    if not answer.tokens:
        return "(stopped)"
    return f"(cut after {answer.tokens:,} tokens; --max-new-tokens {2 * sampling.max_new_tokens} allows more)"


def visible(text: str) -> str:
    """The text without control characters that a terminal would obey; newlines and tabs stay."""
    return "\n".join(escape(line.replace("\t", "    ")) for line in text.split("\n"))


def _typed() -> Iterator[str]:
    """Lines that are typed, with editing and history where Python has readline; Ctrl-C gives up a line."""
    if importlib.util.find_spec("readline") is not None:
        import readline  # noqa: F401 - input() uses it once it is loaded
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
            continue
        if line:
            yield line


@contextmanager
def _ctrl_c_stops_an_answer() -> Iterator[None]:
    """SIGINT alone is Ctrl-C; other signals end the process, and its terminal is left as it was found."""
    def stop(number: int, frame: FrameType | None) -> None:
        if not is_loading(frame):  # half a library would be left behind
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        with undone(_terminal_as_it_is()):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _terminal_as_it_is() -> Callable[[], None]:
    """What puts the terminal back, which `input` has otherwise while a line is typed."""
    if not sys.stdin.isatty():
        return lambda: None
    found = termios.tcgetattr(sys.stdin)
    return lambda: termios.tcsetattr(sys.stdin, termios.TCSANOW, found)
