"""Greedy answers of a GGUF file to the demo's task, as llama.cpp serves it.

python tools/demo/served.py FILE.gguf ROWS.json OUT.json TOKENS
"""

import json
import sys
from pathlib import Path

from tuner.export.gguf.engine import GREEDY, Engine, served

CONTEXT = 512


def answered(engine: Engine, messages: list[dict[str, str]], tokens: int) -> str:
    """The answer to a chat, without what ends it."""
    prompt = engine.ids(engine.rendered(messages), framed=True)
    return "".join(piece.text for piece in engine.answer(prompt, tokens, GREEDY))


def main() -> int:
    """Write the answers to every set in ROWS.json."""
    file, rows, out = (Path(word).resolve() for word in sys.argv[1:4])
    tokens, sets = int(sys.argv[4]), json.loads(rows.read_text(encoding="utf-8"))
    with served(file, CONTEXT) as engine:
        said = {part: [answered(engine, row["messages"][:-1], tokens) for row in own] for part, own in sets.items()}
    out.write_text(json.dumps({"answers": said}, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
