"""Tasks by plain transformers, one item at a time, without any code of tuner: what its scores are held to.

    python -m tools.eval_plain MODEL TASK.jsonl ... [--max-length 2048] [--output DIR] [--against DIR]

MODEL is a Hugging Face directory; weights and products are float32. `--output` writes a result for each item;
`--against` compares with those of `tuner eval MODEL --tasks TASK.jsonl --train.precision fp32 --output DIR`, item by
item, and exits with 1 where a choice, an answer or a figure differs, or a likelihood by more than a ten-thousandth of a
nat per token.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.commands import asked

NATS = 1e-4
"""The most by which a token's likelihood may differ between two orders of adding up, in nats."""


class Plain:
    """A model and its tokenizer."""

    def __init__(self, directory: Path, max_length: int) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.max_length = max_length

    def nats(self, context: list[int], continuation: list[int]) -> float:
        """The log-likelihood of a continuation."""
        ids = torch.tensor([[*context, *continuation][-(self.max_length + 1) :]])
        logits = self.model(ids[:, :-1]).logits[0, -len(continuation) :].float()
        each = torch.log_softmax(logits, -1).gather(1, torch.tensor(continuation)[:, None])
        return float(each.double().sum())

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both."""
        kept = context.rstrip()
        whole = self.tokenizer(context + continuation)["input_ids"]
        before = self.tokenizer(kept)["input_ids"]
        return whole[: len(before)], whole[len(before) :]

    def choice(self, item: dict[str, Any]) -> dict[str, Any]:
        """The result of an item with choices."""
        found, tokens = [], 0
        for choice in item["choices"]:
            gap = "" if item["prompt"][-1:].isspace() or choice[:1].isspace() else " "
            context, continuation = self.pair(item["prompt"], gap + choice)
            found.append(self.nats(context, continuation))
            tokens = max(tokens, len(continuation))
        by_letter = [nats / len(choice) for nats, choice in zip(found, item["choices"], strict=True)]
        right = item["answer"]
        picked, picked_norm = found.index(max(found)), by_letter.index(max(by_letter))
        bits = -found[right] / math.log(2) / len(item["choices"][right].encode())
        figures = {"acc": float(picked == right), "acc_norm": float(picked_norm == right), "bits_per_byte": bits}
        return {"figures": figures, "picked": picked, "log_likelihoods": found, "tokens": tokens}

    def text(self, item: dict[str, Any]) -> dict[str, Any]:
        """The result of a text, in windows without overlap; the last one has as much before it as fits."""
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        ids, nats = [first, *self.tokenizer(item["text"])["input_ids"]], 0.0
        for start in range(1, len(ids), self.max_length):
            window = ids[start : start + self.max_length]
            nats -= self.nats(ids[max(0, start - (self.max_length + 1 - len(window))) : start], window)
        return {"sums": {"nats": nats, "tokens": len(ids) - 1, "bytes": len(item["text"].encode())}}

    def question(self, item: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
        """The result of a generated answer."""
        ids = torch.tensor([self.tokenizer(item["prompt"])["input_ids"]])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
            pad_token_id=self.tokenizer.eos_token_id, tokenizer=self.tokenizer, stop_strings=item.get("stop") or None,
        )  # fmt: skip
        answer = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in item.get("stop", []):
            answer = answer.partition(stop)[0]
        right = [item["answer"]] if isinstance(item["answer"], str) else item["answer"]
        return {"figures": {"exact_match": float(answer.strip() in {one.strip() for one in right})}, "answer": answer}

    def result(self, item: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
        """The result of an item of any kind."""
        if "choices" in item:
            return self.choice(item)
        return self.text(item) if "text" in item else self.question(item, max_new_tokens)


def differences(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[list[str], float]:
    """What differs, a line for each item, and the largest difference of a likelihood, in nats per token."""
    if len(plain) != len(ours):
        return [f"{len(plain)} items by transformers, {len(ours)} by tuner"], math.inf
    problems, largest = [], 0.0
    for number, (one, two) in enumerate(zip(plain, ours, strict=True), 1):
        if "sums" in one:
            off = abs(one["sums"]["nats"] - two["sums"]["nats"]) / one["sums"]["tokens"]
            same = all(one["sums"][key] == two["sums"][key] for key in ("tokens", "bytes"))
        elif "picked" in one:
            pairs = zip(one["log_likelihoods"], two["log_likelihoods"], strict=True)
            off = max(abs(a - b) for a, b in pairs) / one["tokens"]
            figures = [(one["figures"][name], two["figures"][name]) for name in ("acc", "acc_norm")]
            same = one["picked"] == two["picked"] and all(a == b for a, b in figures)
        else:
            off, same = 0.0, one["answer"] == two["answer"] and one["figures"] == two["figures"]
        largest = max(largest, off)
        if not same or off > NATS:
            problems.append(f"item {number}: {json.dumps(one)[:200]} is not {json.dumps(two)[:200]}")
    return problems, largest


def main() -> int:
    """Score the tasks."""
    options = asked(
        __doc__, {"model": Path, "tasks": [Path]}, max_length=2048, max_new_tokens=64, output=Path, against=Path,
    )
    plain, failed = Plain(options.model, options.max_length), False
    for task in options.tasks:
        items = [json.loads(line) for line in task.read_text(encoding="utf-8").splitlines()]
        started = time.monotonic()
        with torch.no_grad():
            results = [plain.result(item, options.max_new_tokens) for item in items]
        print(f"{task.stem}: {len(items)} items in {time.monotonic() - started:.1f} s")
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(result) + "\n" for result in results)
            (options.output / f"{task.stem}.jsonl").write_text(text)
        if options.against is not None:
            ours = (options.against / f"{task.stem}.jsonl").read_text(encoding="utf-8").splitlines()
            problems, largest = differences(results, [json.loads(line) for line in ours])
            print(f"{task.stem}: {len(problems)} of {len(items)} items differ; likelihoods {largest:.1e} nats a token")
            print(*problems[:10], sep="\n", end="\n" if problems else "")
            failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
