"""The ids of training against those of an export's readers, for tokenizers of many families.

    python tools/tokenizer_campaign.py ASSETS WORK [--chats 1000] [--only NAME ...]

For each family a tiny model is trained for one step with the real command on the same chats, and exported with the real
command. Every prepared document must have the ids that `AutoTokenizer.from_pretrained(EXPORT)` gives the row's messages
with `apply_chat_template`. Prints a table; `masked` are the rows whose answers have an exact mask, in a training on the
answers alone. Exits with 1 where a row differs. ASSETS is filled by `tools/fetch_assets.py ASSETS --campaign`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.reference.product import opened  # noqa: E402
from tests.reference.written import PLAIN, randomly  # noqa: E402
from tools.tokenizer_families import FAMILIES, Family, write_family  # noqa: E402

Chat = list[dict[str, str]]
LENGTH = 1024
_WORDS = f"{'family':28} {'kind':22} {'files':44} {'class':22}"
_FIGURES = f"{'rows':>5} {'kept':>5} {'equal':>5} {'masked':>6} {'seconds':>7}"


def chats(assets: Path, count: int) -> list[Chat]:
    """Conversations of a user and an assistant: half of them published ones, half with difficult contents."""
    chance = random.Random(0)
    hard = [chat.messages for chat in [*PLAIN.values(), *randomly(6 * count).values()] if _alternates(chat.messages)]
    pairs = [_pair(row) for name in ("alpaca_en_demo", "alpaca_zh_demo") for row in _rows(assets, name)]
    chance.shuffle(pairs)
    real: list[Chat] = []
    while pairs:
        turns = [pairs.pop() for _ in range(min(chance.choice((1, 1, 2, 3)), len(pairs)))]
        real.append([message for pair in turns for message in pair])
    mixed = [*hard[: count // 2], *real[: count - count // 2]]
    return [[{"role": m["role"], "content": m["content"]} for m in chat] for chat in mixed][:count]


def _alternates(messages: list[dict[str, Any]]) -> bool:
    roles = [message["role"] for message in messages]
    return len(roles) % 2 == 0 and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def _rows(assets: Path, name: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((assets / "llamafactory" / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def _pair(row: dict[str, str]) -> list[dict[str, str]]:
    question = row["instruction"] + (f"\n{row['input']}" if row["input"] else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def campaign(family: Family, assets: Path, work: Path, rows: list[Chat]) -> dict[str, Any]:
    """Train, export and compare; the figures of one line of the table."""
    from transformers import AutoTokenizer

    started = time.monotonic()
    directory = work / family.name.replace(" ", "-").replace(",", "")
    write_family(family, assets, directory / "model", lambda: [m["content"] for chat in rows for m in chat])
    (directory / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in rows), encoding="utf-8"
    )
    recipe = {
        "model": {"name_or_path": "./model", "init": "random"},
        "data": {"train": "rows.jsonl", "max_length": LENGTH, "on_bad_row": "skip", "workers": 1},
        "method": {"kind": "sft", "train_on": "all"},
        "train": {"duration": "1 steps", "global_batch_size": 1, "micro_batch_size": 1},
        "output_dir": "runs",
    }
    (directory / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    prepared = _command(directory, "prepare-data", "recipe.yaml")
    masked = _command(directory, "prepare-data", "recipe.yaml", "--method.train_on", "assistant")
    trained = _command(directory, "train", "recipe.yaml")
    exported = _command(directory, "export-hf", trained["artifacts"]["path"])
    product = opened(Path(prepared["artifacts"]["path"]))
    theirs: Any = AutoTokenizer.from_pretrained(exported["artifacts"]["path"])  # type: ignore[no-untyped-call]
    refused = {reject["line"]: reject["reason"] for reject in product.rejects}
    kept = [chat for line, chat in enumerate(rows, 1) if line not in refused]
    expected = [theirs.apply_chat_template(chat, return_dict=False) for chat in kept]
    equal = sum(list(ids) == document.ids.tolist() for ids, document in zip(expected, product.documents, strict=True))
    return {
        "class": type(theirs).__name__,
        "rows": len(rows),
        "kept": len(kept),
        "equal": equal,
        "masked": masked["metrics"]["masks"]["proven"],
        "reasons": "; ".join(sorted(set(refused.values()))),
        "seconds": time.monotonic() - started,
    }


def _command(directory: Path, *words: str) -> dict[str, Any]:
    environment = {**os.environ, "TUNER_CACHE": str(directory / "cache"), "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tuner", *words, "--json"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> int:
    """Parse the command line, run every family, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("assets", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    rows = chats(arguments.assets, arguments.chats)
    print(f"{_WORDS} {_FIGURES}")
    wrong = 0
    for family in FAMILIES:
        if arguments.only and family.name not in arguments.only:
            continue
        try:
            found = campaign(family, arguments.assets, arguments.work, rows)
        except subprocess.CalledProcessError as error:
            wrong += 1
            print(
                f"{family.name:28} {' '.join(error.cmd[3:])} ended with {error.returncode}: {error.stderr[-600:]}",
                flush=True,
            )
            continue
        wrong += found["equal"] != found["kept"]
        words = f"{family.name:28} {family.kind:22} {family.form:44} {found['class']:22}"
        figures = f"{found['rows']:5} {found['kept']:5} {found['equal']:5} {found['masked']:6} {found['seconds']:7.1f}"
        print(f"{words} {figures} {found['reasons'][:120]}".rstrip(), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
