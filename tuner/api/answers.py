"""Answers of models to prompts."""

from collections.abc import Sequence
from pathlib import Path

from tuner.api.given import absolute, console_of
from tuner.generate import Answer, Generator, Message, Prompt, Sampling
from tuner.generate import load_generator as load


def load_generator(model: str | Path, base: str | None = None, quiet: bool = False) -> Generator:
    """Load a run, a checkpoint, a Hugging Face directory or a hub name once, to answer many prompts."""
    name = str(absolute(model)) if Path(model).expanduser().exists() else str(model)
    console = console_of("info", quiet)
    return load(name, base=base, warn=console.warn)


def generate(
    model: str | Path | Generator, prompts: str | Sequence[str | Sequence[Message]], sampling: Sampling | None = None,
    system: str | None = None, quiet: bool = False,
) -> list[Answer]:
    """Answer prompts, each a text or a list of messages, through the chat template of a model's tokenizer."""
    generator = model if isinstance(model, Generator) else load_generator(model, quiet=quiet)
    chosen, before = sampling or Sampling(), ({"role": "system", "content": system},) if system else ()
    answers = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        shown = str(messages[-1]["content"]) if messages else ""
        answers.append(generator.generate(Prompt(shown, messages=(*before, *messages)), chosen))
    return answers
