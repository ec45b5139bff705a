"""Rows of other layouts: the line that is proposed for them is written, and what is trained is compared.

    python -m tools.advice_campaign rows [--tree DIRECTORY] [--record FILE] [--plant] [--command N] [--list]

Each layout of `layouts.jsonl` is read under each method that it speaks of, with a chat template and without one, and by
`tuner init`; where a row is refused, each line of the hint is written into the recipe and the rows are read again. What
an example then holds, and which characters of it are trained, is what the layout says is meant, or nothing is read.
`--tree` asks another checkout and `--record` writes its verdicts: `rows_before.jsonl` are those of the tree before
proposals were tried, of which none that was right may be lost. `--plant` gives wrong proposals, each of which must be
found; `--command` holds what the real command says against what the functions say.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.commands import asked, read_lines, workplace, write_lines
from tools.tables import read_table

HERE = Path(__file__).resolve().parent
LAYOUTS, BEFORE = HERE / "layouts.jsonl", HERE / "rows_before.jsonl"
PLANTED: list[dict[str, Any]] = read_table(HERE / "planted_rows.yaml")
"""Wrong proposals."""
ANSWERS = ("read", "advice", "init")
PLAIN_TOO = ("by column", "none")
"""Layouts whose roles are those of columns: as plain text, prompt and answer are the same."""
_ADVICE = re.compile(r"(?:^|; or )(write .*?)(?=; or |$)")
_SOURCE = re.compile(r"the source as (\{.*\})(?= and |\)| to learn | \(|,|$)")
_METHOD = re.compile(r"method\.kind: (\w+)")
_TEMPLATE = re.compile(r"tokenizer\.chat_template: (\w+)")
BEGIN, END, EOS = "<|im_start|>", "<|im_end|>", "<|eos|>"


@dataclass(frozen=True)
class Verdict:
    """What came of one way of reading a layout."""

    how: str
    """`read`, `advice`, `init`; `none`, where nothing was read or proposed; `other`, where the layout does not say."""
    line: str
    """What was proposed."""
    right: bool
    why: str = ""


def layouts(path: Path = LAYOUTS) -> list[dict[str, Any]]:
    """The layouts, in the order of their file."""
    return read_lines(path)


class Place:
    """A directory with the rows of a layout and a model; what is read there goes through the product's own code."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        from tuner.config.recipe import AddedToken
        from tuner.data.encoding.tokenizer import TextTokenizer, byte_files, with_tokens
        from tuner.data.encoding.tokenizer_files import template_source

        ends = [AddedToken(token=token, special=True) for token in (BEGIN, END)]
        files, _ = with_tokens(byte_files(), ends)
        del files["chat_template.jinja"]
        chatml = template_source("chatml")
        self.tokenizers = {None: TextTokenizer(files)}
        self.tokenizers |= {name: TextTokenizer(files, template_source(name)) for name in ("chatml", "qwen3")}
        for name, more in (("chat", {"chat_template.jinja": chatml.encode()}), ("plain", {})):
            (directory / name).mkdir()
            for file, content in {**files, **more, "config.json": b"{}"}.items():
                (directory / name / file).write_bytes(content)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows."""
        write_lines(self.directory / "rows.jsonl", rows)

    def recipe(self, method: str, template: str | None, source: Any = "rows.jsonl") -> dict[str, Any]:
        """A recipe for the rows."""
        tokenizer = {} if template is None or method == "pretrain" else {"chat_template": template}
        data = {"train": [source], "max_length": 1 << 14}
        return {"model": {"name_or_path": "./plain"}, "tokenizer": tokenizer, "method": {"kind": method}, "data": data}

    def trained(self, recipe: Mapping[str, Any]) -> tuple[list[Any], list[list[tuple[str, bool]]]]:
        """The examples in the rows, and of each its documents as runs of text that is trained or not. DataError."""
        from tuner.config.load import load_recipe
        from tuner.data.building.documents import explain
        from tuner.data.building.spec import PrepareSpec
        from tuner.data.reading.blocks import blocks, examples_of
        from tuner.data.reading.problems import RecordProblem
        from tuner.data.sources import expand

        given = load_recipe(recipe, [], self.directory).recipe
        tokenizer = self.tokenizers[given.tokenizer.chat_template]
        spec = PrepareSpec(given.data, given.method.examples, tokenizer, 1 << 14, 0, self.directory / "cache")
        files = expand(given.data.train)
        found = [pair for file in files for block in blocks(file) for pair in examples_of(block, spec.examples.kind)]
        documents = [runs(view.tokens) for view in explain(spec, len(found))]  # raises what the command shows
        examples = [example for _, example in found if not isinstance(example, RecordProblem)]
        return [(example, spec.examples.train_on) for example in examples], documents

    def init(self, model: str) -> dict[str, Any]:
        """The recipe that `tuner init` writes, with the byte tokenizer."""
        from tuner.config.load import load_recipe
        from tuner.config.starter import Room, starter
        from tuner.data.look import look

        here = Path.cwd()
        os.chdir(self.directory)
        try:
            given = load_recipe({"model": {"name_or_path": f"./{model}"}, "data": {"train": "rows.jsonl"}}).recipe
            seen = look(given.model.name_or_path, given.data.train[0])
            text = starter(f"./{model}", "rows.jsonl", seen, Room("this machine", 1 << 40))
            (self.directory / "written.yaml").write_text(text, encoding="utf-8")
            recipe = load_recipe(self.directory / "written.yaml").recipe
        finally:
            os.chdir(here)
        source = recipe.data.train[0].model_dump(include={"path", "format", "columns"})
        template = recipe.tokenizer.chat_template or ("chatml" if model == "chat" else None)
        return self.recipe(recipe.method.kind, template, source)


def runs(tokens: Sequence[Any]) -> list[tuple[str, bool]]:
    """Tokens as runs of text, each trained or not."""
    found: list[tuple[str, bool]] = []
    for token in tokens:
        if found and found[-1][1] == token.trained:
            found[-1] = (found[-1][0] + token.text, token.trained)
        else:
            found.append((token.text, token.trained))
    return found


def advice(hint: str) -> Iterator[str]:
    """The lines that a hint proposes to write, but for leaving rows out; what is to be filled in is none."""
    for match in _ADVICE.finditer(hint):
        if "YOURS" not in match[1] and "on_bad_row" not in match[1]:
            yield match[1]


def written(recipe: Mapping[str, Any], line: str) -> dict[str, Any]:
    """The recipe with a proposed line written into it."""
    from ruamel.yaml import YAML

    changed: dict[str, Any] = json.loads(json.dumps(recipe))
    if (source := _SOURCE.search(line)) is not None:
        changed["data"]["train"] = [YAML(typ="safe").load(source[1])]
    if (method := _METHOD.search(line)) is not None:
        changed["method"]["kind"] = method[1]
    if changed["method"]["kind"] == "pretrain":
        changed["tokenizer"].pop("chat_template", None)
    if (template := _TEMPLATE.search(line)) is not None:
        changed["tokenizer"]["chat_template"] = template[1]
    if changed == recipe:
        raise ValueError(f"not understood: {line}")
    return changed


def meant_of(layout: Mapping[str, Any], method: str) -> list[Any] | None:
    """What a layout means under a method, in a list; None where it speaks neither of it nor of one that reads alike."""
    meant = layout["meant"]
    alike = {"dpo": "reward", "reward": "dpo"}.get(method, method)
    if method not in meant and method == "pretrain" and all("text" in row for row in meant.get("sft") or [{}]):
        alike = "sft"
    return next(([meant[name]] for name in (method, alike) if name in meant), None)


def meant_wrong(layout: Mapping[str, Any], method: str, found: Any, is_proposed: bool = True) -> str:
    """What is wrong with examples and documents read of a layout under a method; empty where they are as meant."""
    examples, documents = found
    meant = (meant_of(layout, method) or [None])[0]
    if meant is None:
        learns = is_proposed or any(trained for document in documents for _, trained in document)
        return f"read, though {layout.get('why', 'nothing is meant')}" if learns else ""
    if len(examples) != len(meant):
        return f"{len(examples)} of {len(meant)} rows are examples"
    plain = layout["roles"] in PLAIN_TOO
    for (example, train_on), wanted in zip(examples, meant, strict=True):
        read = as_meant(example, train_on, method)
        if read != forms(wanted) and not (plain and as_text(read) == as_text(forms(wanted))):
            return f"read {json.dumps(read, ensure_ascii=False)}"
    return trained_wrong(documents, meant)


def trained_wrong(documents: Sequence[list[tuple[str, bool]]], meant: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the characters that are trained, by the texts that are meant to be."""
    thinks = any("<think>" in text for document in documents for text, _ in document)  # the template writes thoughts
    wanted = [texts for row in meant for texts in learned_texts(row, thinks)]
    if len(documents) != len(wanted):
        return f"{len(documents)} documents of {len(wanted)}"
    for document, texts in zip(documents, wanted, strict=True):
        trained = "".join(text for text, is_trained in document if is_trained)
        left = trained.replace(END, "").replace(EOS, "")
        first = document[0][0] if not document[0][1] else ""  # the first token of all is predicted from nothing
        for text in [part[1:] if part[:1] == first and i == 0 else part for i, part in enumerate(texts)]:
            if text.strip() not in left:
                return f"not trained: {text!r}"
            left = left.replace(text.strip(), "", 1)
        if left.strip():
            return f"trained too: {left!r}"
    return ""


def learned_texts(row: Mapping[str, Any], thinks: bool = False) -> list[list[str]]:
    """Of each document of a row, the texts that are trained."""
    if "text" in row:
        return [[row["text"]]]
    if "messages" in row:
        return [[part for message in row["messages"] if message["trained"] for part in said(message, thinks)]]
    answers = [row[key] for key in ("chosen", "rejected", "completion") if key in row]
    return [
        [answer] if isinstance(answer, str) else
        [part for message in answer if message["role"] == "assistant" for part in said(message, thinks)]
        for answer in answers
    ]  # fmt: skip


def said(message: Mapping[str, Any], thinks: bool) -> list[str]:
    """The words of a message, its thought and its calls as the template writes them."""
    made = [{"name": call["name"], "arguments": call["arguments"]} for call in message.get("tool_calls", ())]
    calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made]
    thought = message.get("reasoning_content") if thinks else None
    thought = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return [*([thought + message["content"]] if message.get("content") else []), *calls]


def as_meant(example: Any, train_on: str, method: str) -> dict[str, Any]:
    """An example in the form of what is meant."""
    kind = type(example).__name__
    if kind == "Pair":
        sides = [split(side) for side in (example.chosen, example.rejected)]
        return {"prompt": sides[0][0], "chosen": sides[0][1], "rejected": sides[1][1]}
    if kind == "Labelled":
        prompt, completion = split(example.example)
        return {"prompt": prompt, "completion": completion, "label": example.label}
    if kind == "PromptCompletion":
        return {"prompt": example.prompt, "completion": example.completion}
    if kind == "PlainText":
        return {"text": example.text}
    answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    rule = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(example.messages))}[train_on]
    flags = [i in rule if own is None else own for i, own in enumerate(example.train)]
    return {"messages": [(*plain(m), flag) for m, flag in zip(example.messages, flags, strict=True)]}


def split(example: Any) -> tuple[Any, Any]:
    """The prompt and the answer of an example."""
    if type(example).__name__ == "PromptCompletion":
        return example.prompt, example.completion
    messages = [plain(message) for message in example.messages]
    said = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    first = min([i for i in said if example.train[i]] + said[-1:])
    return messages[:first], messages[first:]


def plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What counts of a message."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    called = [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls]
    return message["role"], message.get("content") or "", message.get("reasoning_content") or "", tuple(called)


def forms(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is meant, in the form of `as_meant`."""
    made: dict[str, Any] = {}
    for key, value in row.items():
        if key == "messages":
            made[key] = [(*plain(message), message["trained"]) for message in value]
        elif key in {"prompt", "completion", "chosen", "rejected"} and isinstance(value, list):
            made[key] = [plain(message) for message in value]
        elif key not in {"margin", "tools"}:
            made[key] = value
    return made


def as_text(form: Mapping[str, Any]) -> Any:
    """A form of one turn as plain texts, without the blanks at their seam; of more turns as it is."""
    made = dict(form)
    if (messages := made.pop("messages", None)) is not None:
        if [(message[0], message[4]) for message in messages] != [("user", False), ("assistant", True)]:
            return form
        made |= {"prompt": messages[0][1], "completion": messages[1][1]}
    for key, role in (
        ("prompt", "user"),
        ("completion", "assistant"),
        ("chosen", "assistant"),
        ("rejected", "assistant"),
    ):
        value = made.get(key)
        if isinstance(value, list):
            if [message[0] for message in value] != [role]:
                return form
            made[key] = value[0][1]
        if key in made:
            made[key] = made[key].strip()
    return made


def verdicts(place: Place, layout: Mapping[str, Any], method: str, template: str | None) -> list[Verdict]:
    """What comes of a layout under a method: read as it is, or each line that is proposed followed."""
    from tuner.errors import TunerError

    recipe = place.recipe(method, template)
    try:
        found = place.trained(recipe)
    except TunerError as error:
        if "has no chat template" in error.message and template is None:
            return verdicts(place, layout, method, "chatml")  # the advice of that error
        lines = list(advice(error.hint or ""))
        made = [followed(place, layout, recipe, line) for line in lines]
        return made or [Verdict("none", "", True, error.message)]
    wrong = meant_wrong(layout, method, found, False)
    return [Verdict("read", "", not wrong, wrong)]


def followed(place: Place, layout: Mapping[str, Any], recipe: Mapping[str, Any], line: str) -> Verdict:
    """What comes of a line that is proposed."""
    from tuner.errors import TunerError

    try:
        changed = written(recipe, line)
        try:
            found = place.trained(changed)
        except TunerError as error:
            if "has no chat template" not in error.message:
                raise
            changed["tokenizer"]["chat_template"] = "chatml"
            found = place.trained(changed)
    except (TunerError, ValueError) as error:
        return Verdict("advice", line, False, str(getattr(error, "message", error)))
    if meant_of(layout, changed["method"]["kind"]) is None:
        return Verdict("other", line, True, "a method that the layout does not speak of")
    wrong = meant_wrong(layout, changed["method"]["kind"], found)
    return Verdict("advice", line, not wrong, wrong)


def of_init(place: Place, layout: Mapping[str, Any], model: str) -> Verdict:
    """What comes of the recipe that `tuner init` writes."""
    from tuner.errors import TunerError

    try:
        recipe = place.init(model)
    except TunerError as error:
        return Verdict("none", "", True, error.message)
    source = {key: value for key, value in recipe["data"]["train"][0].items() if key != "path"}
    line = f"method.kind: {recipe['method']['kind']} {json.dumps(source)}"
    try:
        found = place.trained(recipe)
    except TunerError as error:
        says = "on_bad_row" in (place.directory / "written.yaml").read_text(encoding="utf-8")
        return Verdict("none" if says else "init", line, says, error.message)
    if meant_of(layout, recipe["method"]["kind"]) is None:
        return Verdict("other", line, True, "a method that the layout does not speak of")
    wrong = meant_wrong(layout, recipe["method"]["kind"], found, bool(source["columns"]))
    return Verdict("init", line, not wrong, wrong)


def all_of(place: Place, layout: Mapping[str, Any]) -> dict[str, list[Verdict]]:
    """Every verdict of a layout, by method and template."""
    place.rows(layout["rows"])
    found: dict[str, list[Verdict]] = {}
    for method in layout["meant"]:
        for name, template in (("chat", "chatml"), ("plain", None)):
            found[f"{method} {name}"] = verdicts(place, layout, method, template)
    for model in ("chat", "plain"):
        found[f"init {model}"] = [of_init(place, layout, model)]
    return found


def lost(now: Mapping[str, dict[str, list[Verdict]]]) -> list[str]:
    """The cells that were answered rightly before, and are no longer answered."""
    found = []
    for name, cells in before().items():
        for cell, made in cells.items():
            was = [(line or how, right) for how, right, line in made if how in ANSWERS]
            is_now = any(one.right and one.how in ANSWERS for one in now.get(name, {}).get(cell, []))
            if name in now and was and all(right for _, right in was) and not is_now:
                found.append(f"{name} {cell}: {was[0][0]}")
    return found


def planted(place: Place, chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Wrong proposals that were followed and not found; each layout has one of the other kind of mistake."""
    by_name = {layout["id"]: layout for layout in chosen}
    missed = []
    for wrong in PLANTED:
        name, line = wrong["layout"], wrong["line"]
        place.rows(by_name[name]["rows"])
        if followed(place, by_name[name], place.recipe(wrong["method"], wrong["template"]), line).right:
            missed.append(f"{name}: {line}")
    return missed


def by_command(place: Place, chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Layouts of which the command says something else than the functions under it."""
    import subprocess

    from tuner.errors import TunerError

    differs = []
    for layout in chosen:
        method = next(iter(layout["meant"]))
        place.rows(layout["rows"])
        recipe = place.recipe(method, "chatml")
        try:
            place.trained(recipe)
            said = ""
        except TunerError as error:
            said = f"  hint: {error.hint}"
        recipe["tokenizer"] = {"name_or_path": "byte", **recipe["tokenizer"]}
        (place.directory / "asked.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "tuner", "prepare-data", "asked.yaml", "--explain", "9"]
        done = subprocess.run(command, cwd=place.directory, capture_output=True, text=True, check=False)
        same = done.returncode == 0 if not said else done.returncode == 3 and said in done.stderr.splitlines()
        differs += [] if same else [f"{layout['id']}: {done.stderr.strip()[-500:]}"]
    return differs


def main(words: Sequence[str] | None = None) -> int:
    """Print what came of every piece of advice; 1 where one is wrong or lost, or a planted one is not found."""
    given = asked(
        __doc__, {}, words, tree=(Path, "another checkout, which is asked in place of this one"),
        record=(Path, "write the verdicts"), plant=(False, "follow wrong proposals"),
        command=(int, "ask the command of each Nth layout, and compare"), list=(False, "print every piece of advice"),
        only=([], "names of layouts"),
    )
    if given.tree is not None:
        sys.path.insert(0, str(given.tree.resolve()))
    chosen = [layout for layout in layouts() if not given.only or layout["id"] in given.only]
    with workplace() as name:
        place = Place(name)
        if given.plant:
            missed = planted(place, chosen)
            print(
                *[f"not found: {one}" for one in missed],
                f"{len(PLANTED) - len(missed)} of {len(PLANTED)} found",
                sep="\n",
            )
            return 1 if missed else 0
        if given.command:
            os.environ["TUNER_CACHE"] = f"{name}/cache"
            each = chosen[:: given.command]
            differs = by_command(place, each)
            print(*differs, f"{len(each) - len(differs)} of {len(each)} the same by the command", sep="\n")
            return 1 if differs else 0
        found = {layout["id"]: all_of(place, layout) for layout in chosen}
    return report(found, given)


def kept(made: Sequence[Verdict]) -> list[tuple[str, bool, str]]:
    """What is recorded of verdicts."""
    return [(one.how, one.right, one.line) for one in made if one.how != "none"]


def before() -> dict[str, dict[str, list[tuple[str, bool, str]]]]:
    """The verdicts of the tree before proposals were tried, by layout and by method and template."""
    return {line["id"]: line["cells"] for line in read_lines(BEFORE)}


def report(found: Mapping[str, dict[str, list[Verdict]]], given: Any) -> int:
    """Print the figures; 1 where something is wrong."""
    counts: Counter[str] = Counter()
    advised = set()
    for name, cells in found.items():
        for cell, made in cells.items():
            for one in made:
                counts[f"{one.how} {'right' if one.right else 'wrong'}"] += 1
                if one.how in {"advice", "init"}:
                    advised.add(name)
                if given.list or not one.right:
                    print(f"{'' if one.right else 'WRONG '}{name} [{cell}] {one.how} {one.line} {one.why}"[:700])
    if given.record is not None:
        lines = (
            {"id": name, "cells": {cell: kept(made) for cell, made in cells.items()}} for name, cells in found.items()
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        given.record.write_text(text, encoding="utf-8")
    gone = lost(found) if given.tree is None else []
    print(*[f"LOST {one}" for one in gone], sep="\n")
    print(
        f"{len(found)} layouts, {len(advised)} with advice: "
        + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    )
    return 1 if gone or any(n for what, n in counts.items() if what.endswith("wrong")) else 0
