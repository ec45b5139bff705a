"""`tuner generate`: answers of a run, a checkpoint, a Hugging Face directory or a hub model, for people to look at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.cli.command import (
    DebugOption,
    JsonOption,
    Outcome,
    OutputOptions,
    VerboseOption,
    input_path,
    run_command,
)
from tuner.errors import DataError, RecipeError

if TYPE_CHECKING:
    from tuner.generate import Generator, Prompt, Sampling

LABEL_WIDTH = 10


def generate(  # noqa: PLR0913, PLR0917 - one parameter for each option
    model: Annotated[str, typer.Argument(help="Run, checkpoint, Hugging Face directory or hub name; - reads stdin.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to answer; may be given several times.")] = None,
    file: Annotated[
        str | None, typer.Option(help="Prompts from a file: .txt, one a line, or .jsonl with prompt or messages.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk to the model, one line at a time.")] = False,
    compare: Annotated[
        Literal["base"] | None, typer.Option(help="Show the base model's answer beside the trained one's.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The base model, where the directory does not say.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token, above draws.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of drawn tokens.")] = 42,
    system: Annotated[str | None, typer.Option(help="System message before each prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the text itself, without the chat template.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer prompts with a model, greedily unless a temperature is given."""
    stdout = os.dup(1) if chat else -1

    def body() -> Outcome:
        name = str(input_path(model)) if model == "-" else os.path.expanduser(model)
        if chat and (prompt or file or compare or raw):
            raise RecipeError("--chat reads its prompts from stdin; leave out --prompt, --file, --compare and --raw")
        texts = [] if chat else _prompts(prompt or [], file, system, raw)
        from tuner.generate import Sampling, base_of, load_generator
        from tuner.runtime.console import Console

        sampling = Sampling(max_new_tokens, temperature, seed)
        other = (base, None) if base else base_of(name) if compare else None
        console = Console(level="debug" if verbose else "info")
        generator = load_generator(name, base=base, warn=console.warn)
        if chat:
            return _chat(generator, sampling, system, None if json else stdout)
        trained = [generator.answer(item, sampling) for item in texts]
        before: list[str] | None = None
        if compare and other is not None and other[0] is not None:
            template = generator.tokenizer.chat_template
            del generator
            reference = load_generator(other[0], revision=other[1])
            if reference.tokenizer.chat_template is None:
                reference.tokenizer.chat_template = template
            before = [reference.answer(item, sampling) for item in texts]
        return _answers(texts, trained, before)

    run_command("generate", OutputOptions(json, verbose, debug), body)


def _answers(prompts: Sequence[Prompt], trained: Sequence[str], base: Sequence[str] | None) -> Outcome:
    rows = [{"prompt": prompt.shown, "trained": answer} for prompt, answer in zip(prompts, trained, strict=True)]
    if base is None:
        return Outcome("\n".join(map(_visible, trained)), artifacts={"answers": rows}, is_text=True)
    blocks = []
    for row, answer in zip(rows, base, strict=True):
        row["base"] = answer
        head = [_labelled("prompt", row["prompt"])] if len(rows) > 1 else []
        blocks.append("\n".join([*head, _labelled("base", answer), _labelled("trained", row["trained"])]))
    return Outcome("\n\n".join(blocks), artifacts={"answers": rows}, is_text=True)


def _chat(generator: Generator, sampling: Sampling, system: str | None, stdout: int | None) -> Outcome:
    """Answer each line of stdin, the talk so far in mind, until it ends; answers go to `stdout` as they come."""
    from tuner.generate import Prompt

    if not generator.has_template:
        raise RecipeError("the tokenizer has no chat template", hint="use --prompt TEXT --raw")
    talk = [{"role": "system", "content": system}] if system else []
    for line in _lines():
        talk.append({"role": "user", "content": line})
        answer = generator.answer(Prompt(line, messages=tuple(talk)), sampling)
        talk.append({"role": "assistant", "content": answer})
        if stdout is not None:
            os.write(stdout, (_visible(answer) + "\n").encode("utf-8", "replace"))
    if stdout is not None:
        raise SystemExit(0)  # everything that stdout is to carry is there already
    text = "\n".join(message["content"] for message in talk if message["role"] == "assistant")
    return Outcome(text, artifacts={"messages": talk}, is_text=True)


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _prompts(given: Sequence[str], file: str | None, system: str | None, raw: bool) -> list[Prompt]:
    from tuner.generate import Prompt

    rows: list[object] = [*given, *(_rows(file) if file else [])]
    if not rows:
        raise RecipeError("no prompt given", hint="give --prompt TEXT, --file FILE or --chat")
    if raw and system:
        raise RecipeError("--system needs the chat template, --raw leaves it out")
    before = [{"role": "system", "content": system}] if system else []
    prompts = []
    for row in rows:
        if isinstance(row, list):
            if raw:
                raise RecipeError("--raw takes text, the file holds messages")
            prompts.append(Prompt(str(row[-1]["content"]), messages=(*before, *row)))
        else:
            text = str(row)
            messages = (*before, {"role": "user", "content": text})
            prompts.append(Prompt(text, messages=messages, text=text if raw else None))
    return prompts


def _rows(file: str) -> list[object]:
    """The prompts of a file: text, or lists of messages without the answer. Raises DataError with file and line."""
    import json as decoder

    path = input_path(file)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in filled]
    rows: list[object] = []
    for number, line in filled:
        try:
            row = decoder.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
        rows.append(_row(row, f"{path}:{number}"))
    return rows


def _row(row: object, where: str) -> object:
    if isinstance(row, str):
        return row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return row["prompt"]
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list):
        known = [
            {"role": str(item.get("role")), "content": str(item.get("content"))}
            for item in messages
            if isinstance(item, dict)
        ]
        while known and known[-1]["role"] == "assistant":
            known.pop()
        if known and len(messages) >= len(known):
            return known
    raise DataError(f"{where}: expected text, or an object with prompt or messages")


def _labelled(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}" + _visible(text).replace("\n", "\n" + " " * LABEL_WIDTH)


def _visible(text: str) -> str:
    """The text without control characters that a terminal would obey; newlines and tabs stay."""
    from tuner.runtime.console import escape

    return "\n".join(escape(line.replace("\t", "    ")) for line in text.split("\n"))
