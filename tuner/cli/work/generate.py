"""What `tuner generate` does and shows: prompts read, answered and laid side by side."""

import json as decoder
from collections.abc import Sequence
from typing import Any

from tuner.cli.command import Outcome, input_path
from tuner.cli.work.talk import visible
from tuner.errors import DataError, RecipeError
from tuner.generate import Answer, Generator, Prompt, Sampling, base_of, load_generator
from tuner.runtime.console import Console

__all__ = ["Sampling", "answer", "prompts_of"]
LABEL_WIDTH = 10


def answer(
    name: str, base: str | None, compare: bool, prompts: Sequence[Prompt], drawn: Sequence[Sampling], console: Console
) -> Outcome:
    """Answer prompts with a model, each by all that is `drawn`; with `compare` with its base model too."""
    drawn[0].check()
    asked = [(prompt, sampling) for prompt in prompts for sampling in drawn]
    other = (base, None) if base else base_of(name) if compare else None
    with console.doing(f"loading {name}"):
        generator = load_generator(name, base=base, warn=console.warn)
    trained = _answered(generator, asked, console)
    before: list[Answer] | None = None
    if compare and other is not None and other[0] is not None:
        template = generator.tokenizer.chat_template
        del generator
        with console.doing(f"loading {other[0]}"):
            reference = load_generator(other[0], revision=other[1])
        if reference.tokenizer.chat_template is None:
            reference.tokenizer.chat_template = template
        before = _answered(reference, asked, console)
    return _answers(asked, trained, before, with_seeds=len(drawn) > 1)


Asked = Sequence[tuple[Prompt, Sampling]]


def _answered(generator: Generator, asked: Asked, console: Console) -> list[Answer]:
    answers = []
    for number, (prompt, sampling) in enumerate(asked, 1):
        with console.doing(f"answer {number} of {len(asked)}"):
            answers.append(generator.generate(prompt, sampling))
    return answers


def _answers(asked: Asked, trained: Sequence[Answer], base: Sequence[Answer] | None, with_seeds: bool) -> Outcome:
    rows: list[dict[str, Any]] = [
        {"prompt": prompt.shown, "trained": answer.text, "tokens": answer.tokens, "cut": answer.cut}
        | ({"seed": sampling.seed} if with_seeds else {})
        for (prompt, sampling), answer in zip(asked, trained, strict=True)
    ]
    warnings = _cut(trained, asked[0][1])
    if base is None:
        text = "\n".join(visible(answer.text) for answer in trained)
        return Outcome(text, artifacts={"answers": rows}, warnings=warnings, is_text=True)
    blocks = []
    for row, before in zip(rows, base, strict=True):
        answer = row["base"] = before.text
        head = [_labelled("prompt", row["prompt"])] if len(rows) > 1 else []
        blocks.append("\n".join([*head, _labelled("base", answer), _labelled("trained", row["trained"])]))
    return Outcome("\n\n".join(blocks), artifacts={"answers": rows}, warnings=warnings, is_text=True)


def _cut(answers: Sequence[Answer], sampling: Sampling) -> list[str]:
    """A warning where answers stopped at the limit and not at an end of their own."""
    cut = sum(answer.cut for answer in answers)
    if not cut:
        return []
    which = "the answer was" if len(answers) == 1 else f"{cut} of {len(answers)} answers were"
    return [f"{which} cut at the limit; --max-new-tokens {2 * sampling.max_new_tokens} allows more"]


def prompts_of(given: Sequence[str], file: str | None, system: str | None, raw: bool) -> list[Prompt]:
    """The prompts that are typed and those of a file. Raises RecipeError and DataError."""
    rows: list[object] = [*given, *(_rows(file) if file else [])]
    if not rows:
        raise RecipeError("no prompt given", hint="give --prompt TEXT or --file FILE, or talk: tuner chat MODEL")
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
        known = [{key: str(one.get(key)) for key in ("role", "content")} for one in messages if isinstance(one, dict)]
        while known and known[-1]["role"] == "assistant":
            known.pop()
        if known:
            return known
    raise DataError(f"{where}: expected text, or an object with prompt or messages")


def _labelled(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}" + visible(text).replace("\n", "\n" + " " * LABEL_WIDTH)
