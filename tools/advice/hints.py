"""Every advice of the program that proposes a line, a flag or a command: provoked, followed, and gone.

    python -m tools.advice.hints [--only BEGINNING ...]

A case (`hint_cases`) says how the advice comes about and which ways out are meant, as the documents have them. The ways
are read out of what the command says, held against these, and followed one by one: each time the same command has to
succeed, and what was said is not said again. Exits with 1 where one is wrong.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

from tools.advice.hint_cases import Case, cases
from tools.advice.hint_place import Place, judged
from tools.advice.hint_sites import Site, sites
from tools.advice.hint_starts import STARTS
from tools.commands import asked, workplace

WHAT_TO_DO = (
    "these texts propose a line, a flag or a command, and nobody has followed them: add cases to "
    "tools/advice/hint_cases, of how each comes about and what it means"
)


def without_case(found: Iterable[Site], covered: Iterable[Case], allowed: Iterable[str]) -> list[str]:
    """Names of the sites that no case is about and that are not allowed to have none."""
    known = (*(case.site for case in covered), *allowed)
    return [site.name for site in found if not site.name.startswith(known)]


def needless(found: Sequence[Site], covered: Iterable[Case], allowed: Mapping[str, Sequence[str]]) -> list[str]:
    """What is allowed to have no case and has one, or is not there any more."""
    named = {site.name for site in found}
    there = {name for name in named if not name.startswith(tuple(case.site for case in covered))}
    every = (entry for entries in allowed.values() for entry in entries)
    return [entry for entry in every if not any(name.startswith(entry) for name in there)]


def main(words: Sequence[str] | None = None) -> int:
    """Judge the cases; 1 where one is wrong."""
    only = tuple(asked(__doc__, {}, words, only=([], "beginnings of names of sites")).only)
    chosen = [case for case in cases() if not only or case.site.startswith(only)]
    wrong = 0
    with workplace() as directory:
        place = Place(directory)
        for case in chosen:
            why = judged(case, place, STARTS)
            wrong += bool(why)
            print(f"{'WRONG' if why else 'ok   '} {case.site} {why}", flush=True)
    followed = {site for case in chosen for site in case.sites}
    print(f"{len(chosen) - wrong} of {len(chosen)} right, at {len(followed)} of {len(sites())} sites")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
