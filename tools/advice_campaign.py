"""Every line that `tuner` proposes is written, and what is then trained or resolved is compared with what was meant.

    python -m tools.advice_campaign PART [options of the part]

The parts are modules of `tools/advice`, each with a `main` of its own; what is meant is in the files of JSON lines next
to them, written from the documents of other tools by somebody who had not seen the answers.

- `rows`: rows of other layouts, under each method, with a chat template and without one.
- `keys`: keys of other tools in a recipe, and by `tuner import`.
- `files`: whole configuration files of other tools, by `tuner import`.
- `hints`: what errors and warnings propose.
"""

import importlib
import sys
from collections.abc import Sequence

PARTS = ("rows", "keys", "files", "hints")


def main(words: Sequence[str] | None = None) -> int:
    """Run the part that the first word names; 1 where a piece of advice is wrong."""
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] not in PARTS:
        print(f"name one of: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"tools.advice.{words[0]}").main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
