"""What `tuner prepare-data` does and shows.

Explained rows have what is trained in brackets and colour for people, and a JSON line a token for programs.
"""

import json
import os
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.config.load import LoadedRecipe
from tuner.data.building.cache import cache_path, valid
from tuner.data.building.documents import DocumentView, TokenView, explain
from tuner.data.building.prepare import PreparedInfo, check_prepared, prepare, prepare_portions
from tuner.data.building.report import done_line, report_lines
from tuner.data.building.spec import PrepareSpec, keys_of, prepare_spec
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.errors import counted
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console, escape


def spec_of(loaded: LoadedRecipe) -> PrepareSpec:
    """What a recipe has prepared. Raises RecipeError and DataError."""
    given = loaded.recipe
    return prepare_spec(given.model, given.tokenizer, given.data, given.method, given.seed)


def prepared(loaded: LoadedRecipe, spec: PrepareSpec, reference: bool, console: Console, verbose: bool) -> Outcome:
    """Prepare the data, or what is there of its portions; with `reference` its columns too."""
    recipe = str(loaded.path) if loaded.path else None
    if spec.data.portions is not None and not reference:
        return _prepared_portions(spec, spec.data.portions.noun, console, recipe)
    outcome = _prepared(spec, console, recipe)
    return _with_reference(loaded, outcome, console, verbose) if reference else outcome


def _prepared(spec: PrepareSpec, console: Console, recipe: str | None) -> Outcome:
    with console.doing("reading the sources"):
        info = prepare(spec, console)
    say_report(info, spec, console)
    metrics = {**info.report, "max_length": spec.max_length, "seconds": round(info.seconds, 3)}
    if not info.cached:
        metrics["megabytes_per_s"] = round(info.report["bytes"] / 1e6 / max(info.seconds, 1e-9), 3)
    return Outcome(
        str(info.path), artifacts={"key": info.key, "cached": info.cached}, metrics=metrics,
        warnings=list(info.warnings), next=f"tuner train {recipe}" if recipe else None,
    )


def _prepared_portions(spec: PrepareSpec, noun: str, console: Console, recipe: str | None) -> Outcome:
    """Prepare every portion that is there, each on a line of its own; the result is their directories, in order."""
    portions, warnings = [], []
    with console.doing("reading the sources"):
        for portion, info in prepare_portions(spec, console):
            there = {} if info is None else {"path": str(info.path), "key": info.key, "cached": info.cached}
            portions.append({"name": portion.name, "files": list(portion.files), **there})
            if info is None:
                console.say(noun, f"{portion.name}: no rows")
                continue
            documents = info.report["train"]["documents"]
            how = "already prepared" if info.cached else f"prepared in {info.seconds:.1f} s"
            console.say(noun, f"{portion.name}: {counted(documents, 'document')}, {how}")
            warnings += [f"{spec.called(portion)}: {text}" for text in info.warnings]
    return Outcome(
        "\n".join(str(portion["path"]) for portion in portions if "path" in portion), artifacts={f"{noun}s": portions},
        metrics={f"{noun}s": len(portions), "max_length": spec.max_length}, warnings=warnings,
        next=f"tuner train {recipe}" if recipe else None, is_text=True,
    )


def _with_reference(loaded: LoadedRecipe, outcome: Outcome, console: Console, verbose: bool) -> Outcome:
    """The outcome with the directory of the reference, computed on the processes that training would have."""
    with console.doing("loading libraries"):
        from tuner.run.prepare_reference import prepare_reference

    options = LaunchOptions(level="debug" if verbose else "info")
    found = prepare_reference(loaded, Path(outcome.result), console, options)
    return replace(outcome, artifacts={**outcome.artifacts, "reference": str(found)})


def say_report(info: PreparedInfo, spec: PrepareSpec, console: Console) -> None:
    """Say what was prepared, as a table."""
    if info.cached:
        console.say("prepared", f"already prepared ({info.seconds:.1f} s)")
    for label, text in report_lines(info.report, spec.examples.kind, spec.max_length, spec.data.packs_rows):
        console.say(label, text)
    if not info.cached:
        console.say("done", done_line(info.report["bytes"], info.seconds))


def checked(spec: PrepareSpec) -> Outcome:
    """The directory of what is prepared. Raises DataError where it is not."""
    path = check_prepared(spec)
    return Outcome(str(path), artifacts={"key": path.name, "cached": True})


def planned(spec: PrepareSpec, console: Console) -> Outcome:
    """What would be read and built."""
    keys = keys_of(spec)
    path = cache_path(spec.cache_dir, "prepared", keys.prepared)
    there = valid(path, "prepared") is not None
    files = [file for source in [*keys.train, *(keys.eval or [])] for file in source.files]
    size = sum(file.size() for file in files)
    console.say("read", f"{counted(len(files), 'file')}, {size:,} bytes")
    console.say("plan", f"rows of {spec.max_length:,} tokens, longer documents: {spec.too_long}")
    console.say("prepared", "already prepared" if there else "not yet prepared")
    return Outcome(
        str(path), artifacts={"cached": there},
        metrics={"files": len(files), "bytes": size, "max_length": spec.max_length}, is_text=True,
    )


def explained(spec: PrepareSpec, count: int, terminal: bool, every_token: bool) -> Outcome:
    """The first records, with what is trained in brackets."""
    rows = list(explain(spec, count))
    artifacts = {"rows": [[asdict(token) for token in row.tokens] for row in rows]}
    if not terminal:
        return Outcome(token_lines(rows), artifacts=artifacts, is_text=True)
    text = row_texts(rows, spec.tokenizer, not os.environ.get("NO_COLOR"), every_token)
    return Outcome(text, artifacts=artifacts, is_text=True)


_ON, _DIM, _OFF = "\x1b[7;32m", "\x1b[2m", "\x1b[0m"


def token_lines(rows: list[DocumentView]) -> str:
    """Return a JSON line for each token: file, line, document, its place in that, text, id, trained, kept and rule."""
    return "\n".join(
        json.dumps(
            {"file": row.name, "line": row.line, "document": row.document, "token": i, "text": token.text,
             "id": token.id, "trained": token.trained, "kept": token.kept, "rule": token.rule},
            ensure_ascii=False,
        )
        for row in rows
        for i, token in enumerate(row.tokens)
    )  # fmt: skip


def row_texts(rows: list[DocumentView], tokenizer: TextTokenizer, colour: bool, every_token: bool) -> str:
    """Return each row's text with its trained parts in brackets; with `every_token`, a line for each token too."""
    return "\n\n".join(_row(row, tokenizer, colour, every_token) for row in rows)


def _row(row: DocumentView, tokenizer: TextTokenizer, colour: bool, every_token: bool) -> str:
    which = f"document {row.document + 1} of {row.documents}, " if row.documents > 1 else ""
    which = f"{row.answer}, " if row.answer else which
    head = escape(f"{row.name}:{row.line}  {which}{_size(row)}{f'; {row.drawn}' if row.drawn else ''}")
    if row.document == 0:
        head += "".join(f"\nan answer of this row is left out: {escape(reason)}" for reason in row.left_out)
    lines = [f"{_DIM}{head}{_OFF}" if colour else head, _marked(row.kept or row.tokens, tokenizer, colour)]
    if row.fate == "truncate":
        cut = escape(tokenizer.decode([token.id for token in row.tokens[row.before :] if not token.kept]))
        lines += ["-- cut here; what follows is left out --", f"{_DIM}{cut}{_OFF}" if colour else cut]
    if every_token:
        lines += [_token(i, token, colour) for i, token in enumerate(row.tokens)]
    return "\n".join(lines)


def _size(row: DocumentView) -> str:
    """How many tokens a document has, and what rows hold of them."""
    trained = sum(token.trained for token in row.kept or row.tokens)
    text, limit = f"{len(row.tokens):,} tokens", f"data.max_length {row.max_length:,}"
    is_pair = bool(row.answer) and row.documents > 1
    if row.fate == "drop":
        why = f"{'with the other answer ' if is_pair else ''}longer than {limit} (data.too_long: drop)"
        return f"{text}: dropped, {why}; {trained:,} would be trained [in brackets]"
    if row.before:
        text += f", the first {row.before:,} of its prompt left out (data.max_prompt_length)"
    if row.fate == "truncate":
        to = f"{len(row.kept):,} tokens, which leave room for the other answer in " if is_pair else ""
        text += f", cut to {to}{limit}"
    elif row.fate == "split":
        text += f", split into {-(-len(row.tokens) // row.max_length):,} pieces of {limit}"
    return f"{text}, {trained:,} trained [in brackets]"


def _marked(tokens: list[TokenView], tokenizer: TextTokenizer, colour: bool) -> str:
    parts = []
    for trained, group in groupby(tokens, key=lambda token: token.trained):
        text = tokenizer.decode([token.id for token in group])
        shown = "\n".join(escape(line) for line in text.split("\n"))
        opening, closing = (_ON, _OFF) if colour else ("", "")
        parts.append(f"{opening}[{shown}]{closing}" if trained else shown)
    return "".join(parts)


def _token(i: int, token: TokenView, colour: bool) -> str:
    text = escape(json.dumps(token.text, ensure_ascii=False))
    line = f"{i:>6}  {token.id:>7}  {'trained' if token.trained else '-':<7}  {token.rule:<16}  {text}"
    return f"{_ON}{line}{_OFF}" if colour and token.trained else line
