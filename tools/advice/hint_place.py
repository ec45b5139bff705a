"""A place to try advice in: a recipe and its files as some step of a user's day left them, and commands run there."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from tools.advice.hint_cases import Case
from tools.advice.hint_words import AND, RUN, Line, Way, placed, ways, with_lines, with_words
from tools.changes import apply
from tuner.config.load import flatten, load_recipe, recipe_dict

Starts = Mapping[str, Callable[["Place"], object]]
BASE: Mapping[str, Any] = {
    "tokenizer.name_or_path": "byte", "data.train": "rows.jsonl", "data.max_length": 64, "train.duration": "2 steps",
    "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.precision": "fp32", "train.device": "cpu",
    "logging.level": "error",
}
OWN_CODE = "tuner_plugin_"
"""How names of modules begin that are a user's files."""
PLACEHOLDERS = {"RECIPE": "r.yaml", "RUN": "runs/r", "NEW-NAME": "other"}
ELSEWHERE, HERE = {"model.name_or_path": "owner/name"}, {"model.name_or_path": "./model"}
"""A model that is not on this machine, of which nothing is checked, and a tiny one that is."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it said, and its result."""

    code: int
    said: str
    result: str


class Place:
    """A directory that is as it was before each attempt, at one path, since runs keep the paths of their files."""

    def __init__(self, root: Path) -> None:
        self.work, self._kept = root / "work", root / "kept"
        self.environment = {"TUNER_CACHE": str(self.work / "cache"), "HOME": str(self.work / "home")}
        self.environment |= {"NO_COLOR": "1", "COLUMNS": "1000"}

    def begin(self, case: Case, starts: Starts) -> None:
        """Make what a case starts from; each start is made once, and copied."""
        kept = self._kept / case.start
        shutil.rmtree(self.work, ignore_errors=True)
        if not kept.is_dir():
            self.work.mkdir(parents=True)
            starts[case.start](self)
            shutil.copytree(self.work, kept, symlinks=True)
        else:
            shutil.copytree(kept, self.work, symlinks=True)
        apply(case.change, self.work)

    def write(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe, sections of keys."""
        lines = (f"{section}: {json.dumps(keys)}\n" for section, keys in recipe.items())
        (self.work / "r.yaml").write_text("".join(lines), encoding="utf-8")

    def run(self, line: str) -> Ended:
        """Run a command line in this process; `> FILE` at its end is where its result goes, `< FILE` its input."""
        from tuner.cli.main import run

        first, _, line = line.rpartition(AND)
        if first and (ended := self.run(first)).code:
            return ended
        if line.startswith(("mv ", "rm ")):
            return Ended(subprocess.run(shlex.split(line), cwd=self.work, check=False).returncode, "", "")
        line, _, target = line.partition(" > ")
        line, _, given = line.partition(" < ")
        stdin = (self.work / given).read_text(encoding="utf-8") if given else ""
        said, before, stdout = io.StringIO(), dict(os.environ), os.dup(1)
        os.environ.update(self.environment)
        with tempfile.TemporaryFile("w+") as result:
            os.dup2(result.fileno(), 1)
            try:
                with contextlib.chdir(self.work), contextlib.redirect_stderr(said), read_from(io.StringIO(stdin)):
                    code = run(shlex.split(line))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            finally:
                os.dup2(stdout, 1)
                os.close(stdout)
                os.environ.clear()
                os.environ.update(before)
                for name in [name for name in sys.modules if name.startswith(OWN_CODE)]:
                    del sys.modules[name]  # the next command would find the file as it was, where another lies now
            result.seek(0)
            text = result.read()
        if target:
            (self.work / target).write_text(text, encoding="utf-8")
        return Ended(code, said.getvalue(), text)


@contextlib.contextmanager
def read_from(stream: io.StringIO) -> Iterator[None]:
    """For the length of the block, stdin is this."""
    sys.stdin, before = stream, sys.stdin
    try:
        yield
    finally:
        sys.stdin = before


def judged(case: Case, place: Place, starts: Starts, reworded: Callable[[str], str] = str) -> str:
    """Provoke the advice of a case and follow it; what is wrong with it, or nothing."""
    values = {**BASE, **(HERE if case.start != "rows" else ELSEWHERE), **case.recipe}
    place.begin(case, starts)
    place.write(with_lines(values, {}))
    first = place.run(case.words)
    lines = _lines(case, first)
    if not lines:
        return f"it is not said, with exit code {first.code}: {first.said.strip()[-600:]}"
    found: list[Way] = []
    for line in lines:
        text = line.text.replace(f"{place.work}/", "")
        for before, after in case.reading.items():
            text = text.replace(before, after)
        text = re.sub("|".join(map(r"\b{}\b".format, PLACEHOLDERS)), lambda found: PLACEHOLDERS[found[0]], text)
        found += ways(line._replace(text=reworded(text)))
    if sorted(map(_order, found)) != sorted(map(_order, case.meant)):
        return f"it proposes {found}: {lines[0][0]}"
    for way in found:
        if not case.onward:
            place.begin(case, starts)
        place.write(with_lines(values, way))
        if why := _followed(place, case, way):
            return f"{way}: {why}"
    return ""


def _relative(place: Place, value: object) -> object:
    return value.removeprefix(f"{place.work}/") if isinstance(value, str) else value


def _order(way: Way) -> str:
    return repr(sorted(way.items()))


def _lines(case: Case, ended: Ended) -> list[Line]:
    """What was said at the place of a case."""
    said = [*ended.said.splitlines(), *ended.result.splitlines()]
    return [line for line in placed(said) if any(site.found_in(line.text) for site in case.sites)]


def _followed(place: Place, case: Case, way: Way) -> str:
    lines = [*way.get(RUN, ())]
    lines = lines if lines and case.instead else [*lines, with_words(case.words, way)]
    for number, line in enumerate(lines, 1):
        ended = place.run(line)
        if ended.code != (case.ends if number == len(lines) else 0):
            return f"{line} ends with {ended.code}: {ended.said.strip()[-400:]}"
    if _lines(case, ended):
        return f"it is said again: {ended.said.strip()[-400:]}"
    resolved = flatten(recipe_dict(load_recipe(place.work / "r.yaml", cwd=place.work).recipe))
    resolved = {key: _relative(place, value) for key, value in resolved.items()}
    wanted = {key: value for key, value in way.items() if key in resolved and not isinstance(value, (list, NoneType))}
    return "".join(
        f"{key} is {resolved[key]!r}, not {value!r}; " for key, value in wanted.items() if resolved[key] != value
    )
