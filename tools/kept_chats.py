"""How many chats a template keeps, and whether each document of an answer has the ids that transformers prompts with.

    python -m tools.kept_chats ROWS.jsonl TOKENIZER=TEMPLATE.jinja ...

ROWS.jsonl holds rows of messages; TOKENIZER is a directory with tokenizer.json, of which TEMPLATE.jinja replaces the
chat template. For each pair a line says how many rows are kept of how many, in how many documents, and why others are
not. Then every document of an answer is compared with transformers: its ids begin with those of `apply_chat_template`
for the messages before the answer with the generation prompt (of a caller who says nothing of thoughts, or
`enable_thinking` either way), what is trained begins there, holds the answer's words, ends with an end token, and
nothing else is trained. Exit code 1 where one is not so.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tools.commands import asked, one_of, workplace
from tuner.data.encoding.encode import Encoder
from tuner.data.encoding.place import EncodedBatch
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.examples import Conversation, Example
from tuner.data.reading.records import parse_record

CALLERS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, print a line for each template; 1 where a document is not what it should be."""
    places = {"rows": Path, "pairs": ([str], "each TOKENIZER=TEMPLATE")}
    options = asked(__doc__, places, arguments, train_on=one_of(("assistant", "last_assistant"), "assistant"))
    with options.rows.open(encoding="utf-8") as file:
        examples = [parse_record(json.loads(line)) for line in file if line.strip()]
    wrong = 0
    for pair in options.pairs:
        directory, template = map(Path, pair.split("=", 1))
        wrong += judge(directory, template, examples, options.train_on)
    return int(wrong > 0)


def judge(directory: Path, template: Path, examples: list[Example], train_on: Any) -> int:
    """Print what becomes of the rows; return how many documents are not what they should be."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".json", ".jinja")}
    tokenizer = TextTokenizer(files, template.read_text(encoding="utf-8"))
    batch = Encoder(tokenizer, train_on).encode(examples)
    kept = len(examples) - len(batch.problems)
    print(f"{template.stem:32} kept {kept:,} of {len(examples):,} rows, {len(batch.records):,} documents", end="")
    print(f", {len(batch.by_answer):,} rows by answer")
    left_out = Counter(reason for reasons in batch.by_answer.values() for reason in reasons)
    for label, counts in (
        ("refused", Counter(problem.kind for problem in batch.problems.values())),
        ("left out", left_out),
        ("note", batch.notes),
    ):
        for reason, count in counts.most_common():
            print(f"    {label}: {count:,} {reason}")
    wrong = _differing(tokenizer, examples, batch, train_on)
    for line in wrong[:5]:
        print(f"    WRONG: {line}")
    return len(wrong)


def _differing(tokenizer: TextTokenizer, examples: list[Example], batch: EncodedBatch, train_on: str) -> list[str]:
    from transformers import AutoTokenizer

    with workplace() as directory:
        tokenizer.save(directory)
        theirs = AutoTokenizer.from_pretrained(directory)
    wrong = []
    for row, left_out in batch.by_answer.items():
        example = examples[row]
        if left_out or not isinstance(example, Conversation):
            continue
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        answers = answers if train_on == "assistant" else answers[-1:]
        wanted = [i for i in answers if example.train[i] is not False]
        documents = np.flatnonzero(batch.records == row)
        if len(wanted) != len(documents):
            wrong.append(f"row {row + 1}: {len(documents)} documents for {len(wanted)} answers")
            continue
        for i, k in zip(wanted, documents.tolist(), strict=True):
            tokens = slice(int(batch.offsets[k]), int(batch.offsets[k + 1]))
            ids, trained = batch.input_ids[tokens].tolist(), np.flatnonzero(batch.trained[tokens])
            reason = _wrong_with(theirs, example, i, ids, trained.tolist())
            if reason is None and ids[int(trained[-1])] not in tokenizer.eos_ids:
                reason = "no end token at the end of what is trained"
            if reason is not None:
                wrong.append(f"row {row + 1}, message {i}: {reason}")
    return wrong


def _wrong_with(theirs: Any, example: Conversation, i: int, ids: list[int], trained: list[int]) -> str | None:
    for said in CALLERS:
        prompt = theirs.apply_chat_template(
            example.messages[:i], tools=example.tools, add_generation_prompt=True, return_dict=False, **said
        )
        if ids[: len(prompt)] == prompt and trained == list(range(len(prompt), len(prompt) + len(trained))):
            break
    else:
        return "what is trained does not begin after a prompt of apply_chat_template"
    words = example.messages[i]["content"].split("</think>")[-1].strip()
    if not trained or words not in theirs.decode([ids[k] for k in trained]):
        return "the answer's words are not trained"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
