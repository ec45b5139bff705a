"""Chat templates made to take all memory, or to go on for ever, by kinds: those of `hostile_templates.yaml`.

    python -m tools.hostile_templates            the names of all, by kind
    python -m tools.hostile_templates NAME       the source of one

`tools/template_limits_campaign.py` has a command meet each of them; tests/tools/test_template_limits.py renders them.
"""

import sys
from collections import Counter
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


def main() -> int:
    """Print the names, or a source."""
    for name in sys.argv[1:]:
        sys.stdout.write(next(one.source for one in HOSTILE if one.name == name))
    if not sys.argv[1:]:
        for kind, count in Counter(one.kind for one in HOSTILE).items():
            print(f"{kind} ({count}): {', '.join(one.name for one in HOSTILE if one.kind == kind)}")
        print(f"{len(HOSTILE)} templates of {len(_KINDS)} kinds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
