"""Every row of LLaMA-Factory's SFT files: ids and masks of the prepared documents equal transformers'."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.reference import assets, formats, hf, product
from tests.reference.compare import HEADER, Verdict, difference, judge
from tests.reference.templates import MARKED

CHATS = (
    "identity.json",
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "glaive_toolcall_en_demo.json",
    "glaive_toolcall_zh_demo.json",
    "v1_sft_demo.jsonl",
    "reason_tool_use_demo_50.jsonl",
)
TEXTS = ("c4_demo.jsonl", "wiki_demo.txt")
EVERY = 96
"""Of how many rows one is taken; of every one where TUNER_TEST_EVERY_ROW is set, as `make campaign` does."""
REFUSED_SHARE = 0.005
"""Refused rows of a file, at most."""


def check(name: str, verdicts: list[Verdict]) -> None:
    print(f"\n{name}", HEADER, *(verdict.line() for verdict in verdicts), sep="\n")
    differing = [line for verdict in verdicts for line in verdict.differing]
    assert not differing, f"{len(differing)} rows differ, the first: " + "\n".join(differing[:3])
    for verdict in verdicts:
        assert verdict.refused.total() <= verdict.rows * REFUSED_SHARE, verdict.line()


Reference = dict[str, list[product.Encoded]]
"""By file, the reference of each row in order."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for GPT-2's tests: a directory without tokenizer.json is converted once."""
    return tmp_path_factory.mktemp("cache")


def sampled(folder: Path, every: int, directory: Path) -> Path:
    """The files with one of `every` rows, or where they are; of the plain text, which is one row, the beginning."""
    if every == 1 or "TUNER_TEST_EVERY_ROW" in os.environ:
        return folder
    directory.mkdir()
    for file in (*CHATS, *TEXTS):
        text = (folder / file).read_text(encoding="utf-8")
        if file.endswith(".json"):
            text = json.dumps(json.loads(text)[::every], ensure_ascii=False)
        elif file.endswith(".jsonl"):
            text = "\n".join(text.rstrip("\n").split("\n")[::every]) + "\n"
        else:
            text = text[: len(text) // 16]
        (directory / file).write_text(text, encoding="utf-8")
    return directory


def texts(tokenizer: Any, folder: Path) -> Reference:
    """The rows of text and the plain text file, which is one document."""
    found = (
        [row["text"] for row in formats.read(folder / TEXTS[0])],
        [(folder / TEXTS[1]).read_text(encoding="utf-8")],
    )
    return {file: [hf.encode_text(tokenizer, text) for text in rows] for file, rows in zip(TEXTS, found, strict=True)}


def recipe(model: Path, sources: list[Path], **method: str) -> dict[str, Any]:
    data = {"train": [str(path) for path in sources], "max_length": 1024, "on_bad_row": "skip"}
    return {"model": {"name_or_path": str(model)}, "data": data, "method": method or {"kind": "sft"}}


@pytest.mark.parametrize(
    "name", [name if name == "smollm2" else pytest.param(name, marks=pytest.mark.slow) for name in assets.TOKENIZERS]
)
def test_every_row(name: str, tmp_path: Path) -> None:
    """The files as they are (JSON arrays of alpaca and ShareGPT rows, JSONL of messages with typed parts, text).

    And the same conversations as the test writes them: plain messages.
    """
    model, folder = assets.asset(name), sampled(assets.asset("llamafactory"), EVERY, tmp_path / "files")
    tokenizer = assets.tokenizer(model)
    wanted, sources = {}, []
    for file in CHATS:
        chats = [formats.chat_of(row) for row in formats.read(folder / file)]
        shown = [formats.for_template(chat, tokenizer.chat_template) for chat in chats]
        rewritten = product.write_rows(tmp_path / f"as_messages_{Path(file).stem}.jsonl", [c.row() for c in chats])
        wanted[file] = [hf.encode_chat(tokenizer, MARKED[name], chat) for chat in shown]
        wanted[rewritten.name] = wanted[file]
        sources += [folder / file, rewritten]
    wanted |= texts(tokenizer, folder)
    sources += [folder / file for file in TEXTS]
    check(name, judge(wanted, product.prepare(tmp_path, recipe(model, sources)), tokenizer))


@pytest.mark.slow
def test_text(cache: Path, tmp_path: Path) -> None:
    """Pre-training, with GPT-2."""
    model, folder = assets.asset("gpt2"), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    wanted = texts(tokenizer, folder)
    sources = [folder / file for file in TEXTS]
    prepared = product.prepare(tmp_path, recipe(model, sources, kind="pretrain"), cache)
    check("gpt2, text", judge(wanted, prepared, tokenizer))


@pytest.mark.slow
def test_prompt_and_completion(cache: Path, tmp_path: Path) -> None:
    """GPT-2 has no chat template: the prompt is given, the completion and the end token are trained."""
    model, folder = assets.asset("gpt2"), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    wanted, sources = {}, []
    for file in ("identity.json", "alpaca_en_demo.json", "alpaca_zh_demo.json"):
        pairs = [(f"{row['instruction']}\n{row['input']}\n\n", row["output"]) for row in formats.read(folder / file)]
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        sources.append(product.write_rows(tmp_path / f"{Path(file).stem}.jsonl", rows))
        wanted[sources[-1].name] = [hf.encode_pair(tokenizer, *pair) for pair in pairs]
    prepared = product.prepare(tmp_path, recipe(model, sources), cache)
    check("gpt2, prompt and completion", judge(wanted, prepared, tokenizer))


def test_prompts_that_end_within_a_token(cache: Path, tmp_path: Path) -> None:
    """They are encoded apart from the completion."""
    pairs = [
        ("Q: a\nA:", " b"),
        ("Q: a\nA: ", "b"),
        ("Q: a\nA:\n", "\nb"),
        ("un", "believable"),
        ("", "no prompt"),
        ("the same", "the same"),
        ("caf", "e\u0301"),
        ("\U0001f44d", "\U0001f3fd"),
        ("   ", "   x"),
        ("12", "34"),
        ("it", "'s"),
    ]
    model = assets.asset("gpt2")
    tokenizer = assets.tokenizer(model)
    rows = product.write_rows(tmp_path / "rows.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    prepared = product.prepare(tmp_path, recipe(model, [rows]), cache)
    assert not prepared.rejects
    for pair, document in zip(pairs, prepared.documents, strict=True):
        wanted = hf.encode_pair(tokenizer, *pair)
        assert document.same(wanted), f"{pair}: {difference(wanted, document, tokenizer)}"
