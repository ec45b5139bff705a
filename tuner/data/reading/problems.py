"""Why one record cannot be used: the one error of reading, parsing and encoding a record."""

import re

KeyPath = tuple[str | int, ...]
"""Keys and indexes from a record's top to one of its values."""
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER = re.compile(r"\b\d+\b")
_QUOTED_CHARS = 40


def quoted(text: str) -> str:
    """Text of a record as a reason quotes it: in quotes, escaped, and short."""
    return repr(text if len(text) <= _QUOTED_CHARS else f"{text[: _QUOTED_CHARS - 3]}...")


def first_line(error: Exception) -> str:
    """What an error of Arrow says, without its stack."""
    return str(error).strip().partition("\n")[0]


class RecordProblem(Exception):
    """Why one record cannot be used; `col` counts characters from 1, `path` names the value where `col` is not known.

    `hint` is the line to write in the recipe where one, apart from the source's, would make the record usable.
    """

    def __init__(self, reason: str, col: int | None = None, path: KeyPath = (), hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.col = col
        self.path = path
        self.hint = hint

    @property
    def kind(self) -> str:
        """The reason without what it quotes and counts of the record, for counting: files have few kinds."""
        return _NUMBER.sub("N", _QUOTED.sub("'...'", self.reason))

    def __reduce__(self) -> tuple[type["RecordProblem"], tuple[str, int | None, KeyPath, str | None]]:
        """Survive the way between two processes whole."""
        return RecordProblem, (self.reason, self.col, self.path, self.hint)
