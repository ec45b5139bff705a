"""Explained rows for people, with what is trained in brackets and colour, and for programs, a JSON line a token."""

import json
from itertools import groupby

from tuner.data.building.documents import DocumentView, TokenView
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.runtime.console import escape

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
