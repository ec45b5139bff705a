"""Damage a finished run in every way that it can be, ask each command for it, and follow what the commands say.

    python -m tools.damaged_runs
    python -m tools.damaged_runs --states "bit flipped" "all checkpoints gone" --json states.jsonl

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

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fixtures.damaged import COMMANDS, EARLIER, LAST, ONE, RUN, Place, Said
from tools.commands import asked, workplace

MEANS_LAST = ("export", "eval", "generate")
MOST_HINTS = 3
"""Hints that are followed before it counts as a loop; the longest way has two."""
PAIRS = (
    *((first, second) for first in list(ONE)[:5] for second in ("record says running", "record gone")),
    ("bit flipped", "one before: file gone"),
    ("directory gone", "one before: bit flipped"),
)


def states() -> list[tuple[str, ...]]:
    """What is done to the run in each state, in this order."""
    return [*((name,) for name in ONE), ("all bits flipped",), *PAIRS]


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
        if "last checkpoints checked by size" not in said.stderr:
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
        command: {"code": said.code, "last_line": said.last_line, "hint": said.hint} for command, said in found.items()
    }
    return {"state": " + ".join(state), "commands": ended, "wrong": judge(place, state, found)}


@contextmanager
def made_place(directory: Path | None = None) -> Iterator[Place]:
    """A place with the unbroken run in a new directory, which is removed, or in the one given."""
    with workplace(directory) as made:
        place = Place(made)
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
    options = asked(
        __doc__, states=({"nargs": "+"}, "names of states; default all"),
        json=(Path, "a line for each state is written here"),
    )
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
