"""Breaks rows that compare answers and holds what is prepared of them against an oracle, row by row.

    python -m tools.pairs_campaign [--rows 5000] [--seed 1]

Draws good preference rows and labelled rows of every form, mutates most of them, and prepares them as `prepare-data`
does, with `on_bad_row: skip` (byte tokenizer, a template like ChatML). `tools/pair_oracle.py` says which are good, what
is wrong with the others, and which texts and masks become of the good ones. Prints one JSON object; exits 1 on another
verdict, on a reason that is none of the oracle's, on other text, masks, labels or margins, and on any other exception.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.commands import asked, read_lines, workplace, write_lines
from tools.pair_oracle import BEGIN, END, Verdict, judge
from tools.row_mutations import CALL, ODD, TOOLS, words
from tools.tables import beside

TEMPLATE = (
    f"{{% for message in messages %}}{{{{ '{BEGIN}' + message['role'] + '\\n' + message['content'] + '{END}\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{BEGIN}assistant\\n' }}}}{{% endif %}}"
)
Row = dict[str, Any]
Random = random.Random
FAULTS = ("disagreements", "documents_differ", "columns_differ", "exceptions")
CLASSES: dict[str, str] = beside(__file__)
"""A part of the product's reason -> what the oracle calls it; every other reason is about the schema."""


def good_row(r: Random, kind: str) -> Row:
    """A row of some form."""
    made = deepcopy(preference(r) if kind == "preference" else labelled(r))
    if r.random() < 0.2:
        made["tools"] = r.choice([TOOLS, json.dumps(TOOLS), None])
    return made


def user(r: Random) -> Row:
    return {"role": "user", "content": words(r)}


def answer(r: Random) -> Row:
    plain: Row = {"role": "assistant", "content": words(r)}
    return plain | r.choice([{}, {}, {"train": True}, {"reasoning_content": "hm"}, {"tool_calls": [CALL]}])


def chat(r: Random) -> list[Row]:
    """A prompt: turns that end with the user's."""
    system = [{"role": "system", "content": words(r)}] * r.randint(0, 1)
    before = [turn for _ in range(r.randint(0, 2)) for turn in (user(r), {"role": "assistant", "content": words(r)})]
    return [*system, *before, user(r)]


def said(r: Random) -> list[Row]:
    """An answer: what the assistant says, perhaps in several turns."""
    more = [answer(r), {"role": r.choice(["tool", "user"]), "content": words(r)}] if r.random() < 0.2 else []
    return [*more, answer(r)]


def spoken(turns: list[Row]) -> list[Row]:
    """Turns as ShareGPT has them."""
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


def preference(r: Random) -> Row:
    prompt, good, bad = chat(r), said(r), said(r)
    text = words(r)
    forms: list[Callable[[], Row]] = [
        lambda: {"prompt": text, "chosen": words(r), "rejected": words(r)},
        lambda: {"chosen": f"{text} {words(r)} x", "rejected": f"{text} y {words(r)}"},
        lambda: {"prompt": prompt, "chosen": good, "rejected": bad},
        lambda: {"prompt": prompt, "chosen": good[-1], "rejected": bad[-1]},
        lambda: {"prompt": prompt, "chosen": words(r), "rejected": words(r)},
        lambda: {"prompt": text, "chosen": good, "rejected": bad},
        lambda: {"chosen": [*prompt, *good], "rejected": [*prompt, *bad]},
        lambda: {"prompt": prompt[-1]["content"], "chosen": [*prompt, *good], "rejected": [*prompt, *bad],
                 "messages": [*prompt, *good]},
        lambda: {"prompt": prompt, "chosen": [*prompt, *good], "rejected": [*prompt, *bad]},
        lambda: {"chosen_messages": [*prompt, *good], "rejected_messages": [*prompt, *bad]},
        lambda: {"conversations": spoken(prompt), "chosen": spoken(good[-1:])[0], "rejected": spoken(bad[-1:])[0]},
        lambda: {"chosen": spoken([*prompt, *good]), "rejected": spoken([*prompt, *bad])},
        lambda: {"instruction": text, "input": r.choice([None, "", words(r)]), "chosen": words(r), "rejected": words(r),
                 "history": r.choice([None, [], [["a", "b"]]]), "system": r.choice([None, "", "brief"])},
        lambda: {"prompt": json.dumps(prompt), "chosen": json.dumps(good), "rejected": json.dumps(bad)},
        lambda: {"messages": prompt, "chosen": good, "rejected": bad},
    ]  # fmt: skip
    extra: list[Row] = [{}, {}, {"margin": 0.5}, {"score_chosen": 3, "score_rejected": 1.5}, {"margin": "2"}, {"id": 7}]
    return r.choice(forms)() | r.choice(extra)


def labelled(r: Random) -> Row:
    prompt, good, text = chat(r), said(r), words(r)
    forms: list[Callable[[], Row]] = [
        lambda: {"prompt": text, "completion": words(r)},
        lambda: {"prompt": prompt, "completion": good},
        lambda: {"prompt": prompt, "completion": words(r)},
        lambda: {"messages": [*prompt, answer(r)]},
        lambda: {"conversations": spoken([*prompt, {"role": "assistant", "content": words(r)}]), "system": None},
        lambda: {"instruction": text, "input": r.choice([None, words(r)]), "output": words(r)},
    ]
    label = r.choice([True, False, 1, 0, "true", "False"])
    return r.choice(forms)() | {r.choice(["label", "label", "kto_tag"]): label}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a row below its top."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def holder(row: Row, path: tuple[str | int, ...]) -> Any:
    """What holds the value at a place."""
    found: Any = row
    for key in path[:-1]:
        found = found[key]
    return found


def mutated(r: Random, row: Row) -> Row:
    """The row with one thing changed in some way."""
    row = deepcopy(row)
    path = r.choice(list(places(row)))
    inside, key = holder(row, path), path[-1]
    top = r.choice(list(row))
    other = r.choice(list(row))

    def swap() -> None:
        row[top], row[other] = row[other], row[top]

    def blank() -> None:
        inside[key] = r.choice(["", " ", "\n", []])

    def control() -> None:
        if isinstance(inside[key], str):
            inside[key] += r.choice([BEGIN, END])

    def lengthen() -> None:
        if isinstance(row[top], list):
            row[top].insert(r.randint(0, len(row[top])), deepcopy(r.choice(row[top])) if row[top] else {})

    def shorten() -> None:
        if isinstance(row[top], list) and row[top]:
            row[top].pop(r.randrange(len(row[top])))

    def wish() -> None:
        if isinstance(inside, dict) and {"role", "from"} & set(inside):
            inside[r.choice(["train", "weight", "loss_weight"])] = r.choice([True, False, 0, 1, 0.5])

    ways: list[Callable[[], Any]] = [
        lambda: inside.__setitem__(key, deepcopy(r.choice(ODD))),
        lambda: inside.pop(key),
        lambda: row.__setitem__(top, deepcopy(row[other])),
        lambda: row.__setitem__(top, json.dumps(row[top])),
        lambda: row.__setitem__(r.choice(["images", "video", "audio"]), r.choice([["x"], [], "y"])),
        lambda: row.__setitem__(r.choice(["margin", "score_chosen", "label", "system"]), deepcopy(r.choice(ODD))),
        swap, blank, control, lengthen, shorten, wish,
    ]  # fmt: skip
    r.choice(ways)()
    return row


def rows(kind: str, count: int, seed: int) -> Iterator[Row]:
    """Rows of a kind: a fifth as they were drawn, the others changed once or twice."""
    r = Random(f"{kind} {seed}")
    for _ in range(count):
        row = good_row(r, kind)
        for _ in range(r.choice([0, 1, 1, 1, 2])):
            row = mutated(r, row) if row else row
        yield row or {"": 0}


@dataclass
class Comparison:
    """What one kind of rows came to."""

    rows: int = 0
    good: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    disagreements: int = 0
    documents_differ: int = 0
    columns_differ: int = 0
    exceptions: int = 0
    examples: list[Any] = field(default_factory=list)

    def wrong(self, what: str, *shown: Any) -> None:
        """Count a difference, and keep the first ones."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.examples) < 6:
            self.examples.append([what, *(repr(one)[:700] for one in shown)])


def class_of(reason: str) -> str:
    """What the oracle calls a reason of the product."""
    return next((name for part, name in CLASSES.items() if part in reason), "schema")


def compare(kind: str, given: list[Row], work: Path) -> Comparison:
    """Prepare rows of a kind and hold each against the oracle."""
    found = Comparison(rows=len(given))
    verdicts = [judge(json.loads(json.dumps(row)), kind) for row in given]
    try:
        refused, documents, columns = prepared(kind, given, work)
    except Exception as error:  # noqa: BLE001 (that there is none is what this looks for)
        found.wrong("exceptions", error)
        return found
    each = 2 if kind == "preference" else 1
    at = 0
    for i, (row, verdict) in enumerate(zip(given, verdicts, strict=True)):
        reason = refused.get(i + 1)
        found.classes[class_of(reason) if reason else "good"] += 1
        if bool(reason) != bool(verdict.faults) or (reason and class_of(reason) not in verdict.faults):
            found.wrong("disagreements", row, sorted(verdict.faults), reason)
        if reason:
            continue
        own = documents[at : at + each]
        if not verdict.faults and own != [merged(document) for document in verdict.documents]:
            found.wrong("documents_differ", row, own, verdict.documents)
        if not verdict.faults and not agrees(verdict, {name: values[at] for name, values in columns.items()}):
            found.wrong("columns_differ", row, verdict, {name: values[at] for name, values in columns.items()})
        found.good += 1
        at += each
    if at != len(documents):
        found.wrong("documents_differ", at, len(documents))
    return found


def merged(document: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours of which both are trained or not, as one; nothing that is empty."""
    parts: list[tuple[str, bool]] = []
    for text, trained in document:
        if parts and parts[-1][1] == trained:
            parts[-1] = (parts[-1][0] + text, trained)
        elif text:
            parts.append((text, trained))
    return parts


def agrees(verdict: Verdict, columns: dict[str, Any]) -> bool:
    """Whether the columns of a document are what its row says."""
    if verdict.label is not None:
        return bool(columns["label"]) == verdict.label
    return float(columns["margin"]) == float(np.float32(verdict.margin or 0))


def prepared(kind: str, given: list[Row], work: Path) -> tuple[dict[int, str], list[Any], dict[str, Any]]:
    """Prepare rows: reasons by line, the documents as parts that are trained or not, and their columns."""
    from dataclasses import replace

    from tuner.config.methods import Examples, SftMethod
    from tuner.config.recipe import DataSection, ModelSection, TokenizerSection
    from tuner.data.building.prepare import prepare
    from tuner.data.building.spec import prepare_spec
    from tuner.data.prepared import open_prepared

    (work / "model").mkdir(parents=True)
    (work / "model" / "config.json").write_text("{}")
    (work / "chatml.jinja").write_text(TEMPLATE)
    write_lines(work / "rows.jsonl", given)
    data = {"train": str(work / "rows.jsonl"), "on_bad_row": "skip", "max_length": 1 << 16}
    spec = prepare_spec(
        ModelSection(name_or_path=str(work / "model")),
        TokenizerSection(name_or_path="byte", chat_template=str(work / "chatml.jinja")),
        DataSection.model_validate({**data, "cache_dir": str(work / "cache")}),
        SftMethod(),
        1,
    )
    examples = Examples("preference" if kind == "preference" else "unpaired", "last_assistant")
    info = prepare(replace(spec, examples=examples))
    refused = {int(line["line"]): str(line["reason"]) for line in read_lines(info.path / "rejects.jsonl")}
    opened = open_prepared(info.path, verify=True).train
    documents: dict[int, Any] = {}
    for row in opened:
        ends = np.cumsum(row.lengths)
        for number, start, end in zip(row.documents.tolist(), ends - row.lengths, ends, strict=True):
            trained, ids = row.trained[start:end], row.input_ids[start:end]
            edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
            spans = zip(edges[:-1], edges[1:], strict=True)
            documents[number] = [(spec.tokenizer.decode(ids[a:b].tolist()), bool(trained[a])) for a, b in spans]
    columns = dict(opened.columns)
    if kind == "preference":
        columns.setdefault("margin", np.zeros(len(documents), dtype=np.float32))
    return refused, [documents[number] for number in sorted(documents)], columns


def main() -> int:
    """Draw, prepare, compare, print; 1 where anything is wrong."""
    options = asked(__doc__, rows=5000, seed=1)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    with workplace() as place:
        for kind in ("preference", "unpaired"):
            drawn = list(rows(kind, options.rows, options.seed))
            found = compare(kind, drawn, place / kind)
            figures[kind] = {**vars(found), "classes": dict(found.classes.most_common())}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - started, 1)}, indent=1))
    return int(any(figures[kind][fault] for kind in ("preference", "unpaired") for fault in FAULTS))


if __name__ == "__main__":
    raise SystemExit(main())
