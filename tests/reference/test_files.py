"""Every row of LLaMA-Factory's SFT files: ids and masks of the prepared documents equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference import assets, formats, hf, product
from tests.reference.compare import HEADER, Verdict, judge
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
REFUSED_SHARE = 0.005
"""Refused rows of a file, at most."""


def check(name: str, verdicts: list[Verdict]) -> None:
    print(f"\n{name}", HEADER, *(verdict.line() for verdict in verdicts), sep="\n")
    differing = [line for verdict in verdicts for line in verdict.differing]
    assert not differing, f"{len(differing)} rows differ, the first: " + "\n".join(differing[:3])
    for verdict in verdicts:
        assert verdict.refused.total() <= verdict.rows * REFUSED_SHARE, verdict.line()


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, list[product.Encoded]]]:
    """By tokenizer and file; both ways of giving the files to the command share one reference."""
    return {}


def expected(
    references: dict[str, dict[str, list[product.Encoded]]], name: str, tokenizer: Any
) -> dict[str, list[product.Encoded]]:
    if name not in references:
        folder, template = assets.asset("llamafactory"), tokenizer.chat_template
        references[name] = {
            file: [
                hf.encode_chat(tokenizer, MARKED[name], formats.for_template(formats.chat_of(row), template))
                for row in formats.read(folder / file)
            ]
            for file in CHATS
        }
    return references[name]


def recipe(model: Path, sources: list[Path], **method: str) -> dict[str, Any]:
    data = {"train": [str(path) for path in sources], "max_length": 2048, "on_bad_row": "skip"}
    return {"model": {"name_or_path": str(model)}, "data": data, "method": method or {"kind": "sft"}}


@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_messages(name: str, references: dict[str, dict[str, list[product.Encoded]]], tmp_path: Path) -> None:
    """The rows rewritten as messages by the test."""
    model, folder = assets.asset(name), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    wanted = {Path(file).stem + ".jsonl": rows for file, rows in expected(references, name, tokenizer).items()}
    sources = [
        product.write_rows(
            tmp_path / f"{Path(file).stem}.jsonl",
            [formats.chat_of(row).row() for row in formats.read(folder / file)],
        )
        for file in CHATS
    ]
    check(f"{name}, as messages", judge(wanted, product.prepare(tmp_path, recipe(model, sources)), tokenizer))


@pytest.mark.parametrize("name", assets.TOKENIZERS)
def test_files_as_they_are(name: str, references: dict[str, dict[str, list[product.Encoded]]], tmp_path: Path) -> None:
    """The files themselves: JSON arrays of alpaca and ShareGPT rows, JSONL of messages with typed parts."""
    model, folder = assets.asset(name), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    prepared = product.prepare(tmp_path, recipe(model, [folder / file for file in CHATS]))
    check(f"{name}, as they are", judge(expected(references, name, tokenizer), prepared, tokenizer))


@pytest.mark.parametrize("name", [*assets.TOKENIZERS, "gpt2"])
def test_text(name: str, tmp_path: Path) -> None:
    """Rows of text and a plain text file, for pre-training."""
    model, folder = assets.asset(name), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    wiki = folder / "wiki_demo.txt"
    texts = {
        "c4_demo.jsonl": [row["text"] for row in formats.read(folder / "c4_demo.jsonl")],
        wiki.name: [wiki.read_text(encoding="utf-8")],
    }
    wanted = {file: [hf.encode_text(tokenizer, text) for text in rows] for file, rows in texts.items()}
    sources = [folder / file for file in texts]
    prepared = product.prepare(tmp_path, recipe(model, sources, kind="pretrain"))
    check(f"{name}, text", judge(wanted, prepared, tokenizer))


def test_prompt_and_completion(tmp_path: Path) -> None:
    """GPT-2, which has no chat template: the prompt is given, the completion and the end token are trained."""
    model, folder = assets.asset("gpt2"), assets.asset("llamafactory")
    tokenizer = assets.tokenizer(model)
    wanted, sources = {}, []
    for file in ("identity.json", "alpaca_en_demo.json", "alpaca_zh_demo.json"):
        pairs = [(f"{row['instruction']}\n{row['input']}\n\n", row["output"]) for row in formats.read(folder / file)]
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        sources.append(product.write_rows(tmp_path / f"{Path(file).stem}.jsonl", rows))
        wanted[sources[-1].name] = [hf.encode_pair(tokenizer, *pair) for pair in pairs]
    prepared = product.prepare(tmp_path, recipe(model, sources))
    check("gpt2, prompt and completion", judge(wanted, prepared, tokenizer))
