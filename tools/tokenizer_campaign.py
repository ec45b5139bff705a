"""The ids of training against those of an export's readers, for tokenizers of many families.

    python -m tools.tokenizer_campaign ASSETS WORK [--chats 7000] [--masks 1000] [--only NAME ...]

For each family a tiny model is trained for one step with the real command on the same chats, and exported with the real
command. Every prepared document must have the ids that `AutoTokenizer.from_pretrained(EXPORT)` gives the row's messages
with `apply_chat_template`; prepared for a training on the answers alone, the mask that `tools/derived_masks.py` derives
with that tokenizer. Prints a table: rows, those kept, those of equal ids; chats with exact masks, their documents, and
the chats whose masks are the derived ones. Exits with 1 where a row differs. ASSETS is filled by
`tools/fetch_assets.py ASSETS --campaign`.
"""

import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.fixtures import forked
from tests.reference.product import Prepared, opened
from tests.reference.written import PLAIN, randomly
from tools.commands import asked, environment, write_lines
from tools.derived_masks import Derivation, Document
from tools.tokenizer_families import FAMILIES, Family, write_family

Chat = list[dict[str, str]]
LENGTH = 1024
_WORDS = f"{'family':30} {'kind':22} {'files':44} {'class':22}"
_FIGURES = f"{'rows':>5} {'kept':>5} {'equal':>5} {'chats':>5} {'documents':>9} {'masks':>5} {'seconds':>7}"


def chats(assets: Path, count: int) -> list[Chat]:
    """Conversations of a user and an assistant: at most half of them published ones, the rest with hard contents."""
    chance = random.Random(0)
    pairs = [_pair(row) for name in ("alpaca_en_demo", "alpaca_zh_demo") for row in _rows(assets, name)]
    chance.shuffle(pairs)
    real: list[Chat] = []
    while pairs:
        turns = [pairs.pop() for _ in range(min(chance.choice((1, 1, 2, 3)), len(pairs)))]
        real.append([message for pair in turns for message in pair])
    real = real[: count - count // 2]
    hard = [chat.messages for chat in [*PLAIN.values(), *randomly(6 * count).values()] if _alternates(chat.messages)]
    mixed = [*hard[: count - len(real)], *real]
    return [[{"role": m["role"], "content": m["content"]} for m in chat] for chat in mixed]


def _alternates(messages: list[dict[str, Any]]) -> bool:
    roles = [message["role"] for message in messages]
    return len(roles) % 2 == 0 and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(roles))


def _rows(assets: Path, name: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((assets / "llamafactory" / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def _pair(row: dict[str, str]) -> list[dict[str, str]]:
    question = row["instruction"] + (f"\n{row['input']}" if row["input"] else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def campaign(family: Family, assets: Path, work: Path, rows: list[Chat], masks: int) -> dict[str, Any]:
    """Train, export and compare; the figures of one line of the table."""
    from transformers import AutoTokenizer

    started = time.monotonic()
    directory = work / family.name.replace(" ", "-").replace(",", "")
    write_family(family, assets, directory / "model", lambda: [m["content"] for chat in rows for m in chat])
    some = rows[:: max(1, len(rows) // masks)]
    for name, part in (("rows", rows), ("some", some)):
        write_lines(directory / f"{name}.jsonl", ({"messages": chat} for chat in part))
    recipe = {
        "model": {"name_or_path": "./model", "init": "random"},
        "data": {"train": "rows.jsonl", "max_length": LENGTH, "on_bad_row": "skip", "workers": 1},
        "method": {"kind": "sft", "train_on": "all"},
        "train": {"duration": "1 steps", "global_batch_size": 1, "micro_batch_size": 1}, "output_dir": "runs",
    }
    (directory / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    prepared = _command(directory, "prepare-data", "recipe.yaml")
    answers_alone = ("--method.train_on", "assistant", "--data.train", "some.jsonl")
    masked = _command(directory, "prepare-data", "recipe.yaml", *answers_alone)
    trained = _command(directory, "train", "recipe.yaml")
    exported = _command(directory, "export-hf", trained["artifacts"]["path"])
    theirs: Any = AutoTokenizer.from_pretrained(exported["artifacts"]["path"])  # type: ignore[no-untyped-call]
    whole, answers = (opened(Path(found["artifacts"]["path"])) for found in (prepared, masked))
    kept = _kept(rows, whole)
    expected = theirs.apply_chat_template(kept, return_dict=False)
    equal = sum(list(ids) == document.ids.tolist() for ids, document in zip(expected, whole.documents, strict=True))
    derivation = Derivation(theirs, family.answer_end or theirs.eos_token)
    return {
        "class": type(theirs).__name__, "rows": len(rows), "kept": len(kept), "equal": equal,
        **_masks(derivation, _kept(some, answers), answers),
        "reasons": "; ".join(sorted({reject["reason"] for reject in [*whole.rejects, *answers.rejects]})),
        "seconds": time.monotonic() - started,
    }


def _kept(rows: list[Chat], prepared: Prepared) -> list[Chat]:
    refused = {reject["line"] for reject in prepared.rejects}
    return [chat for line, chat in enumerate(rows, 1) if line not in refused]


def _masks(derivation: Derivation, kept: list[Chat], prepared: Prepared) -> dict[str, Any]:
    """How many documents there are, how many chats have those of the derivation, and the first that has others."""
    documents = [Document(one.ids.tolist(), one.trained.tolist()) for one in prepared.documents]
    at = alike = left = 0
    other = None
    for chat in kept:
        found = derivation.matched(chat, documents, at)
        if found is None:
            other = other or chat
        taken, without = found or (1, 0)
        at, alike, left = at + taken, alike + (found is not None), left + without
    is_whole = at == len(documents) and left == sum(prepared.report["by_answer"]["left_out"].values())
    return {"chats": len(kept), "documents": len(documents), "alike": alike, "is_whole": is_whole, "other": other}


def _command(directory: Path, *words: str) -> dict[str, Any]:
    env = environment(directory / "cache", threads=None, PYTHONWARNINGS="ignore")
    command = [sys.executable, "-m", "tuner", *words, "--json"]
    done = forked.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> int:
    """Parse the command line, run every family, print the table."""
    arguments = asked(
        __doc__, {"assets": Path, "work": Path}, chats=7000,
        masks=(1000, "how many of them are prepared for masks too"), only=[],
    )
    rows = chats(arguments.assets, arguments.chats)
    print(f"{_WORDS} {_FIGURES}")
    wrong = 0
    for family in FAMILIES:
        if arguments.only and family.name not in arguments.only:
            continue
        if family.needs and importlib.util.find_spec(family.needs) is None:
            print(f"{family.name:30} not tried: it needs pip install {family.needs}")
            continue
        try:
            found = campaign(family, arguments.assets, arguments.work, rows, arguments.masks)
        except subprocess.CalledProcessError as error:
            is_meant = bool(family.refused) and error.returncode == 3 and family.refused in error.stderr
            wrong += not is_meant
            words = f"{family.name:30} {'refused' if is_meant else 'ended'} with {error.returncode}"
            print(f"{words}: {error.stderr.strip()[-400:]}", flush=True)
            continue
        is_right = found["equal"] == found["kept"] and found["alike"] == found["chats"] and found["is_whole"]
        wrong += not is_right or bool(family.refused)
        words = f"{family.name:30} {family.kind:22} {family.form:44} {found['class']:22}"
        figures = f"{found['rows']:5} {found['kept']:5} {found['equal']:5} {found['chats']:5} {found['documents']:9}"
        print(f"{words} {figures} {found['alike']:5} {found['seconds']:7.1f} {found['reasons'][:200]}".rstrip())
        if not is_right:
            print(f"    other masks: {found['other']!r}, all documents seen: {found['is_whole']}")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
