"""Chat templates made to take all memory, or to go on for ever, by kinds: those of `hostile_templates.yaml`.

tests/tools/test_template_limits.py renders them.
"""

from typing import Any, NamedTuple

from tools.tables import beside


class HostileTemplate(NamedTuple):
    """A source, and what it attacks."""

    kind: str
    name: str
    source: str


def source_of(piece: Any) -> str:
    """The text of a piece of a template, or of a list of pieces."""
    if isinstance(piece, str):
        return piece
    if isinstance(piece, list):
        return "".join(map(source_of, piece))
    ((how, (text, *more)),) = piece.items()
    if how == "grow":
        times, step = more
        start = f"{{% set n = namespace(x={text}) %}}"
        return f"{start}{{% for i in range({times}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    if how == "loop":
        (times,) = more or (99999,)
        return f"{{% for i in range({times}) %}}{source_of(text)}{{% endfor %}}"
    if how == "repeat":
        return str(text) * more[0]
    assert how == "number", how
    return "".join(text.replace("<i>", str(i)).replace("<i-1>", str(i - 1)) for i in range(*more))


_KINDS: dict[str, dict[str, Any]] = beside(__file__)
HOSTILE = tuple(
    HostileTemplate(kind, name, source_of(piece)) for kind, named in _KINDS.items() for name, piece in named.items()
)
"""All of them."""
