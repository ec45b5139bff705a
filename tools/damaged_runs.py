"""Damage a finished run in every way that it can be, ask each command for it, and follow what the commands say.

    python tools/damaged_runs.py
    python tools/damaged_runs.py --states "bit flipped" "all checkpoints gone" --json states.jsonl

A tiny run of eight steps with checkpoints of steps 4, 6 and 8 is trained unbroken, in one process. Each state is made
of it anew for every command. Prints a table of exit codes and last lines, and holds the commands to this:

- export, eval and generate of RUN mean its last step: they succeed with it, or end with 3, name the damaged file or
  the missing directory of that step, and say what to type;
- what they say to type is done, word for word, and after it the same command succeeds: no two hints lead to each other;
- `runs list` and `runs show` say what is damaged or gone as far as names and sizes tell, `runs verify` all of it;
- `resume` ends with the tensors, by SHA-256, of the unbroken run; it refuses where every checkpoint is there and
  damaged, says what to type, and that ends with the same tensors.

Exits with 1 where a command does otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RUN = Path("runs") / "r"
LAST, EARLIER = 8, (4, 6)
COMMANDS: dict[str, tuple[str, ...]] = {
    "export": ("export-hf",),
    "eval": ("eval",),
    "generate": ("generate", "--prompt", "1 ", "--max-new-tokens", "2"),
    "resume": ("resume",),
    "runs list": ("runs", "list"),
    "runs show": ("runs", "show"),
    "runs verify": ("runs", "verify"),
}
MEANS_LAST = ("export", "eval", "generate")
MOST_HINTS = 3
"""Hints that are followed before it counts as a loop; the longest way has two."""


@dataclass(frozen=True)
class Said:
    """What a command ended with: exit code, document and stderr."""

    code: int
    document: dict[str, Any]
    stderr: str

    @property
    def last_line(self) -> str:
        """The error's first line, or the last line on stderr."""
        error = self.document.get("error")
        if error is not None:
            return f"error: {error['message'].splitlines()[0]}"
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return " ".join(lines[-1].split()) if lines else ""

    @property
    def hint(self) -> str:
        """The hint of its error; empty without one."""
        return str((self.document.get("error") or {}).get("hint") or "")

    @property
    def text(self) -> str:
        """Everything that it says to people."""
        return f"{self.stderr}\n{self.document.get('artifacts')}"


def shard(checkpoint: Path) -> Path:
    """The file with a checkpoint's tensors."""
    return checkpoint / "rank-0000-of-0001.safetensors"


def flip(checkpoint: Path) -> None:
    """Flip one bit in a weight; in the optimizer's state it would be none of an export's business."""
    tensors = json.loads((checkpoint / "index.json").read_text())["tensors"]
    chunk = next(entry["chunks"][0] for name, entry in sorted(tensors.items()) if name.startswith("model/"))
    data = bytearray(shard(checkpoint).read_bytes())
    data[chunk["start"] + 1] ^= 4
    shard(checkpoint).write_bytes(data)


def says_running(run: Path) -> None:
    """Have the record say what it says while a launch trains."""
    record = json.loads((run / "run.json").read_text())
    record["status"] = "running"
    record.pop("metrics")
    for key in ("ended", "status", "step", "saved_step", "why"):
        record["launches"][-1].pop(key, None)
    (run / "run.json").write_text(json.dumps(record))


def every_flipped(run: Path) -> None:
    """Damage all checkpoints and remove none."""
    for step in (*EARLIER, LAST):
        flip(run / "checkpoints" / f"step-{step}")


Damage = Callable[[Path], None]
ONE: dict[str, Damage] = {
    "bit flipped": lambda run: flip(run / "checkpoints" / f"step-{LAST}"),
    "file gone": lambda run: shard(run / "checkpoints" / f"step-{LAST}").unlink(),
    "directory gone": lambda run: shutil.rmtree(run / "checkpoints" / f"step-{LAST}"),
    "manifest gone": lambda run: (run / "checkpoints" / f"step-{LAST}" / "manifest.json").unlink(),
    "all checkpoints gone": lambda run: shutil.rmtree(run / "checkpoints"),
    "record says running": says_running,
    "record gone": lambda run: (run / "run.json").unlink(),
}
PAIRS = (
    *((first, second) for first in list(ONE)[:5] for second in ("record says running", "record gone")),
    ("bit flipped", "one before: file gone"),
    ("directory gone", "one before: bit flipped"),
)
MORE: dict[str, Damage] = {
    "one before: file gone": lambda run: shard(run / "checkpoints" / f"step-{EARLIER[-1]}").unlink(),
    "one before: bit flipped": lambda run: flip(run / "checkpoints" / f"step-{EARLIER[-1]}"),
    "all bits flipped": every_flipped,
}


ALL: dict[str, Damage] = ONE | MORE


def states() -> list[tuple[str, ...]]:
    """What is done to the run in each state, in this order."""
    return [*((name,) for name in ONE), ("all bits flipped",), *PAIRS]


class Place:
    """A directory with the unbroken run and a copy of it, from which every trial begins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / RUN
        self.sound = directory / "sound"
        self.sha256 = ""

    def set_up(self) -> None:
        """Train the run and keep a copy. Raises RuntimeError where that fails."""
        from tools import resume_campaign

        for name in ("run.launch", "export.hf", "generate", "run.score"):
            importlib.import_module(f"tuner.{name}")
        resume_campaign.prepare(self.directory, 1)
        recipe = self.directory / "r.yaml"
        text = recipe.read_text().replace("duration: 3 epochs", f"duration: {LAST} steps")
        text = text.replace("train: rows.jsonl", "train: rows.jsonl, eval: 10%")
        text = text.replace("every: 4 steps", "every: 2 steps")
        text = text.replace("level: warning", "level: info")
        recipe.write_text(f"{text}eval: {{every: never, at_start: false, samples: 0}}\n")
        said = self.call("train", "r.yaml")
        if said.code:
            raise RuntimeError(f"the unbroken run failed: {said.stderr[-2000:]}")
        self.sha256 = self.content()
        shutil.copytree(self.run, self.sound)

    def damage(self, state: Sequence[str]) -> None:
        """Make a state of the unbroken run anew."""
        shutil.rmtree(self.run)
        shutil.copytree(self.sound, self.run)
        for name in state:
            ALL[name](self.run)

    def content(self) -> str:
        """SHA-256 of the tensors of the last step; empty where that cannot be opened."""
        from tuner.checkpoint.load import content_sha256, open_checkpoint
        from tuner.errors import DataError

        try:
            return content_sha256(open_checkpoint(self.run / "checkpoints" / f"step-{LAST}"))
        except DataError:
            return ""

    def ask(self, command: str, path: str | Path = RUN) -> Said:
        """Run one of the table's commands on a path."""
        first, *rest = COMMANDS[command]
        words = [first, *rest] if command.startswith("runs") else [first, str(path), *rest]
        return self.call(*words, *([str(path)] if command in ("runs show", "runs verify") else []))

    def call(self, *words: str) -> Said:
        """Run a command line of tuner in a child that has imported what takes time."""
        with tempfile.TemporaryDirectory(dir=self.directory, prefix="call-") as place:
            out, err = Path(place) / "out", Path(place) / "err"
            code = os.waitstatus_to_exitcode(self._wait(words, out, err))
            line = out.read_text()
            return Said(code, json.loads(line) if line.startswith("{") else {}, err.read_text())

    def follow(self, hint: str) -> list[Said]:
        """Type what a hint says, word for word; what each command of tuner ended with."""
        made = []
        for typed in filter(None, (part.strip() for part in hint.split("&&"))):
            words = typed.split()
            if words[0] == "tuner":
                made.append(self.call(*words[1:]))
            else:
                subprocess.run(words, cwd=self.directory, check=True)
        return made

    def _wait(self, words: Sequence[str], out: Path, err: Path) -> int:
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        try:
            os.chdir(self.directory)
            for stream, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), stream)
            logging.getLogger().handlers.clear()  # a test's handlers and filters are not those of a command
            warnings.resetwarnings()
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ["TUNER_CACHE"] = str(self.directory / "cache")
            from tuner.cli.main import main

            main([*words, "--json"])
        except SystemExit as ended:
            sys.stderr.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(99)


def typed_in(hint: str) -> list[str]:
    """The command lines in a hint that make the run whole: each way is separated by spaces and begins with a word."""
    return re.findall(r"((?:mv \S+ \S+ && )?tuner resume \S+(?: --\S+ \S+)?)", hint)


def expected(state: Sequence[str], is_whole: bool) -> tuple[int, int | None]:
    """The exit code of what means the last step, and the step that it takes.

    Where neither the record nor a directory tells of the last step any more, the run is one that was killed earlier.
    """
    if is_whole:
        return 0, LAST
    if len(state) > 1 and state[0] == "directory gone" and state[1] in ("record says running", "record gone"):
        return 0, EARLIER[-1]
    return 3, None


def judge(place: Place, state: Sequence[str], found: Mapping[str, Said]) -> list[str]:
    """What the commands did otherwise than they should, a line each."""
    place.damage(state)
    is_whole = place.content() == place.sha256
    code, step = expected(state, is_whole)
    wrong = []
    for command in MEANS_LAST:
        said = found[command]
        if said.code != code:
            wrong.append(f"{command} ended with {said.code}")
        elif code == 3:
            if not re.search(f"checkpoints/step-{LAST}|no checkpoint", said.last_line):
                wrong.append(f"{command} does not name the step: {said.last_line}")
            wrong += ways_on(place, state, command, said)
        elif step != LAST and not any(f"of step {step}" in line for line in said.document["warnings"]):
            wrong.append(f"{command} takes step {step} without a word")
    if code == 0 and found["export"].document["metrics"]["step"] != step:
        wrong.append("export took another step")
    return [*wrong, *judge_looks(state, code, found), *judge_resume(place, state, found["resume"])]


def judge_looks(state: Sequence[str], code: int, found: Mapping[str, Said]) -> list[str]:
    """What `runs` says: of flipped bits `verify` alone, of a record that is gone all three."""
    wrong = []
    unseen = all("bit" in name or name.startswith("one before") or name == "record says running" for name in state)
    seen_by_size = code == 3 and not unseen and state != ("all checkpoints gone", "record says running")
    for name in ("runs list", "runs show"):
        said = found[name]
        if said.code or (seen_by_size or "record gone" in state) != bool(said.document["warnings"]):
            wrong.append(f"{name} says {said.document['warnings']}")
        if "by manifest and sizes" not in said.stderr:
            wrong.append(f"{name} does not say what it checked")
    damaged = code == 3 and "all checkpoints gone" not in state or state in (("all checkpoints gone",),)
    if found["runs verify"].code != (6 if damaged else 0):
        wrong.append(f"runs verify ended with {found['runs verify'].code}")
    return wrong


def judge_resume(place: Place, state: Sequence[str], said: Said) -> list[str]:
    """`resume` makes the run whole, by itself or by what it says to type, and leaves a whole one alone."""
    place.damage(state)
    if said.code == 0:
        made = [place.ask("resume")]
    elif state == ("all bits flipped",):
        made = _make_whole(place, said.hint)
    else:
        return [f"resume ended with {said.code}: {said.last_line}"]
    if not made or made[-1].code or place.content() != place.sha256:
        return [f"after resume: exit codes {[one.code for one in made]}, tensors {place.content()[:12] or 'not there'}"]
    again = place.ask("resume")
    return [] if again.code == 0 and "already trained" in again.stderr else ["resume does not leave a whole run alone"]


def _make_whole(place: Place, hint: str) -> list[Said]:
    """Follow the first way in a hint, and the hint of that, as long as there is one."""
    made: list[Said] = []
    while hint and len(made) < MOST_HINTS:
        lines = typed_in(hint)
        if not lines:
            break
        made += place.follow(lines[0])
        hint = made[-1].hint if made[-1].code else ""
    return made


def ways_on(place: Place, state: Sequence[str], command: str, said: Said) -> list[str]:
    """Take each way that a hint names; the command must succeed then."""
    wrong = []
    for path in re.findall(rf"{re.escape(str(place.run))}/checkpoints/step-\d+", said.hint):
        place.damage(state)
        if place.ask(command, path).code:
            wrong.append(f"{command}: {path}, which its hint names, fails")
    if not typed_in(said.hint):
        return [*wrong, f"{command} does not say how the run becomes whole: {said.hint}"]
    place.damage(state)
    made = _make_whole(place, said.hint)
    again = place.ask(command)
    if not made or made[-1].code or again.code:
        wrong.append(f"{command}: its hint leads to {[one.code for one in made]} and back: {again.last_line}")
    return wrong


def trial(place: Place, state: Sequence[str]) -> dict[str, Any]:
    """All commands on one state."""
    found = {}
    for command in COMMANDS:
        place.damage(state)
        found[command] = place.ask(command)
    ended = {
        command: {"code": said.code, "last_line": said.last_line, "hint": said.hint}
        for command, said in found.items()
    }
    return {"state": " + ".join(state), "commands": ended, "wrong": judge(place, state, found)}


@contextmanager
def made_place(directory: Path | None = None) -> Iterator[Place]:
    """A place with the unbroken run in a new directory, which is removed, or in the one given."""
    with tempfile.TemporaryDirectory(prefix="tuner-damaged-") as made:
        place = Place(Path(os.path.realpath(directory or made)))
        place.set_up()
        yield place


def shown(place: Place, result: Mapping[str, Any]) -> str:
    """The table's part of one state."""
    lines = [str(result["state"])]
    for command, said in result["commands"].items():
        text = said["last_line"].replace(f"{place.run}", "RUN").replace(str(RUN), "RUN")
        lines.append(f"  {command:<12}{said['code']:>3}  {text[:150]}")
        if said["hint"]:
            lines.append(f"{'':17}  hint: {said['hint'].replace(str(place.run), 'RUN')[:150]}")
    return "\n".join([*lines, *(f"  WRONG: {line}" for line in result["wrong"])])


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", nargs="+", help="names of states; default all")
    parser.add_argument("--json", type=Path, help="a line for each state is written here")
    options = parser.parse_args()
    results = []
    with made_place() as place:
        for state in states():
            if options.states and " + ".join(state) not in options.states:
                continue
            results.append(trial(place, state))
            print(shown(place, results[-1]), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(result) + "\n" for result in results))
    wrong = sum(bool(result["wrong"]) for result in results)
    print(json.dumps({"states": len(results), "as_designed": len(results) - wrong, "commands": len(COMMANDS)}))
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
