"""Score answers to the demo's task, and generate them in batches with plain transformers: nothing of `tuner` is used.

python -m tools.demo.score MODEL_DIR ROWS.json OUT.json [--lenient] [--dtype float32]
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BATCH = 100
NEW_TOKENS = 64


def parse(answer: str, lenient: bool) -> dict[str, Any] | None:
    """The object in `answer`: all of it, or with `lenient` the first object found anywhere in it."""
    if not lenient:
        return _object(answer.strip())
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", answer):
        try:
            found, _ = decoder.raw_decode(answer, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def score(answers: Sequence[str], wanted: Sequence[dict[str, Any]], lenient: bool) -> dict[str, float]:
    """Shares in 0..1: answers that are valid JSON, fields that are right, and objects that equal the wanted ones."""
    valid = right = total = exact = 0
    for answer, reference in zip(answers, wanted, strict=True):
        found = parse(answer, lenient)
        valid += found is not None
        values = found or {}
        right += sum(same(values.get(key), value) for key, value in reference.items())
        total += len(reference)
        exact += values == reference
    return {"valid": valid / len(wanted), "fields": right / total, "exact": exact / len(wanted)}


def same(found: object, wanted: object) -> bool:
    """Equal in value and in type, so that "5" is not 5 and true is not 1."""
    return type(found) is type(wanted) and found == wanted


def prompts(rows: Sequence[dict[str, Any]], tokenizer: Any) -> list[str]:
    """The text of every message but the last, ready for the answer."""
    return [
        tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True) for row in rows
    ]


def answer(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """Greedy answers to `texts`, generated in left-padded batches of similar length."""
    import torch

    tokenizer.padding_side = "left"
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    answers = [""] * len(texts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        made = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, made, strict=True):
            answers[index] = text
        print(f"  answered {min(start + BATCH, len(order))} of {len(order)}", file=sys.stderr)
    return answers


def main() -> int:
    """Score one model on every set in ROWS.json and write the figures and the answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    sets: dict[str, list[dict[str, Any]]] = json.loads(options.rows.read_text(encoding="utf-8"))
    rows = [row for part in sets.values() for row in part]
    answers = answer(model, tokenizer, prompts(rows, tokenizer))
    report: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "scores": {}, "answers": {}}
    for name, part in sets.items():
        own, answers = answers[: len(part)], answers[len(part) :]
        wanted = [json.loads(row["messages"][-1]["content"]) for row in part]
        report["scores"][name] = score(own, wanted, options.lenient)
        report["answers"][name] = own
    options.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
