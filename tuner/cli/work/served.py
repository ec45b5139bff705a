"""A talk with a GGUF file, as llama.cpp serves it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.cli.command import Outcome
from tuner.cli.work.talk import Sampling, talk
from tuner.errors import RecipeError
from tuner.export.gguf.engine import GREEDY, Engine, served
from tuner.generate import Answer, Prompt
from tuner.runtime.console import Console

__all__ = ["Sampling", "talk_to"]
CONTEXT = 8192
"""Tokens of a talk at most, or as many as the model takes."""


@dataclass(frozen=True)
class ServedGenerator:
    """A file that llama.cpp serves, as a generator of answers."""

    engine: Engine
    has_template: bool

    def generate(self, prompt: Prompt, sampling: Sampling, show: Callable[[str], None] | None = None) -> Answer:
        """See `Answerer`. KeyboardInterrupt ends the answer, which is then what was shown."""
        sampling.check()
        ids = self.engine.ids(self.engine.rendered(prompt.messages), framed=True)
        room = min(sampling.max_new_tokens, self.engine.context - len(ids))
        if room <= 0:
            raise RecipeError(f"the prompt has {len(ids):,} tokens, the model takes {self.engine.context:,}")
        text, tokens, why = "", 0, None
        try:
            for piece in self.engine.answer(ids, room, _drawn(sampling)):
                text, tokens, why = text + piece.text, piece.tokens, piece.why
                if show is not None and piece.text:
                    show(piece.text)
        except KeyboardInterrupt:
            if show is None:
                raise
            return Answer(text, 0, cut=True)
        return Answer(text, tokens, cut=why == "limit")


def _drawn(sampling: Sampling) -> dict[str, Any]:
    """How llama.cpp draws as transformers does: the temperature first, then the likeliest."""
    if sampling.temperature == 0:
        return dict(GREEDY)
    chain = {"samplers": ["temperature", "top_k", "top_p"], "seed": sampling.seed}
    return {**chain, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def talk_to(name: str, sampling: Sampling, system: str | None, stdout: int | None, console: Console) -> Outcome:
    """Serve a file and talk with it."""
    sampling.check()
    with ExitStack() as stack:
        with console.doing(f"loading {name}"):
            engine = stack.enter_context(served(Path(name), CONTEXT))
        return talk(ServedGenerator(engine, engine.has_template), sampling, system, stdout)
