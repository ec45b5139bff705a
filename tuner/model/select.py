"""Parts of a model chosen by name: which modules or parameters a list of names and globs means."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tuner.errors import RecipeError


def select(patterns: Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """The ``names`` that a pattern means, in their order; ``*`` stands for any characters, dots too.

    A pattern means a dotted name that it matches whole or from a dot on (``q_proj``, ``self_attn.*_proj``), and
    everything below one. Raises RecipeError, blaming ``key``, for a pattern that means nothing.
    """
    known = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in known if _means(pattern, name)}
        if not found:
            near = _near(pattern, known)
            raise RecipeError(
                f"{key}: {pattern!r} matches nothing in this model",
                hint=f"did you mean {' or '.join(near)}?" if near else f"the first names are {', '.join(known[:5])}",
            )
        chosen |= found
    return [name for name in known if name in chosen]


def _means(pattern: str, name: str) -> bool:
    ends = [index for index, letter in enumerate(name) if letter == "."] + [len(name)]
    return any(fnmatchcase(name[:end], pattern) or fnmatchcase(name[:end], f"*.{pattern}") for end in ends)


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names, whole or of one component, that look like the pattern."""
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    return difflib.get_close_matches(pattern, parts, 3, 0.6) or difflib.get_close_matches(pattern, names, 3, 0.5)
