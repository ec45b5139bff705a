"""Why one row cannot be used: the one error of reading, parsing and encoding a row."""

KeyPath = tuple[str | int, ...]
"""Keys and indexes from a row's top to one of its values."""


class RowProblem(Exception):
    """Why one row cannot be used; `col` counts characters from 1, `path` names the value where `col` is not known."""

    def __init__(self, reason: str, col: int | None = None, path: KeyPath = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.col = col
        self.path = path

    def __reduce__(self) -> tuple[type["RowProblem"], tuple[str, int | None, KeyPath]]:
        """Survive the way between two processes whole."""
        return RowProblem, (self.reason, self.col, self.path)
