"""Links, pipes and devices under every name of a run directory and of the cache, and the commands that meet them."""

import os
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.faults.artifacts import RESUME, TRAIN, Artifact, Place
from tests.faults.bombs import teaching
from tests.faults.cases import RUN
from tests.fixtures.tables import cases
from tuner.rundir.layout import NAMES

BELOW: Any = cases(__file__, "below")
"""Names further down in a run directory."""
A = str(RUN)
COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": RESUME, "export-hf": ("export-hf", A), "eval": ("eval", A),
    "generate": ("generate", A, "--prompt", "a", "--max-new-tokens", "2"), "chat": ("chat", A),
    "runs show": ("runs", "show", A), "runs plot": ("runs", "plot", A), "runs verify": ("runs", "verify", A),
    "runs rm": ("runs", "rm", A), "push": ("push", A, "a/b", "--dry-run"), "runs compare": ("runs", "compare", A, A),
}
KEY, VERSION = "[0-9a-f]*", "*-[0-9]"
TOKENIZERS = f"tokenizers/{KEY}"
CACHED = (
    "prepared", "encoded", "reference", "teacher", "tokenizers", "exports", f"prepared/{KEY}", f"encoded/{KEY}",
    f"reference/{KEY}", f"teacher/{KEY}", "prepared/.*.lock", "encoded/.*.lock", f"prepared/{KEY}/manifest.json",
    f"prepared/{KEY}/train.rows.arrow", f"prepared/{KEY}/train.documents.arrow", f"prepared/{KEY}/samples.jsonl",
    f"encoded/{KEY}/manifest.json", f"encoded/{KEY}/train.arrow", f"teacher/{KEY}/manifest.json", TOKENIZERS,
    f"{TOKENIZERS}/.lock", f"{TOKENIZERS}/{VERSION}", f"{TOKENIZERS}/{VERSION}/answer.json",
)  # fmt: skip
"""Every name of the cache; what is a hash is looked for."""
PREPARING: dict[str, tuple[str, ...]] = {
    "train": TRAIN, "prepare-data": ("prepare-data", "{inputs}/r.yaml", "--data.max_length", "48"),
    "prepare-data of more": ("prepare-data", "{inputs}/r.yaml", "--data.eval", "20%"), "data list": ("data", "list"),
    "data verify": ("data", "verify"), "data gc": ("data", "gc", "--unused", "--verify"),
}


def _in_run(place: Place, kind: str, name: str) -> None:
    _to(place, kind, place.run / name)


def _in_cache(place: Place, kind: str, name: str) -> None:
    """At the first path of the cache that a name means; one of a made-up key where there is none."""
    cache = place.root / "cache"
    made_up = cache / name.replace(KEY, "0" * 16).replace("*", "0" * 16)
    _to(place, kind, next(iter(sorted(cache.glob(name))), made_up))


def _to(place: Place, kind: str, link: Path) -> None:
    """Put a link of a kind, or a pipe, in the place of whatever is there."""
    place.outside.mkdir(exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    moved = place.outside / "moved"
    if os.path.lexists(link):
        link.rename(moved)
    if kind == "a pipe":
        os.mkfifo(link)
        return
    if kind == "to a pipe":
        os.mkfifo(place.outside / "pipe")
    if kind == "to a directory":
        (place.outside / "directory").mkdir()
    targets = {"to what was there": moved, "to nothing": place.outside / "none", "to zeros": Path("/dev/zero")}
    link.symlink_to(targets.get(kind, place.outside / kind.rpartition(" ")[2]))


KINDS = ("to what was there", "to a directory", "to nothing", "to zeros", "to a pipe", "a pipe")


def links() -> Iterator[Artifact]:
    """Every name, each met by several commands, with links of all kinds in turn."""
    yield from _in_runs()
    yield from _in_the_cache()


def _in_runs() -> Iterator[Artifact]:
    kinds, commands = cycle(KINDS), cycle(COMMANDS)
    for name in sorted({*NAMES, *BELOW}):
        for _ in range(3):
            kind, command = next(kinds), next(commands)
            # What no run has at a name that is its own, a pipe too, may be passed over.
            is_inside = name.startswith("checkpoints/step-4/")
            refused = None if kind == "a pipe" or is_inside else True
            said = "no export yet" if command == "push" and is_inside else Path(name).name  # it looks at no checkpoint
            plant = partial(_in_run, kind=kind, name=name)
            yield Artifact(f"{command}: {name}, {kind}", plant, COMMANDS[command], said, refused)
    for kind in KINDS[:2]:
        plant, listed = partial(_in_run, kind=kind, name="metrics.jsonl"), ("runs", "list", "runs")
        yield Artifact(f"runs list: metrics.jsonl, {kind}", plant, listed, "metrics.jsonl: a link", refused=False)


def _in_the_cache() -> Iterator[Artifact]:
    kinds, commands = cycle(KINDS), cycle(PREPARING)
    for name in CACHED:
        for _ in range(3):
            kind, command = next(kinds), next(commands)
            plant = partial(_in_cache, kind=kind, name=name)
            yield Artifact(f"{command}: cache/{name}, {kind}", plant, PREPARING[command], "", refused=None)
    for kind in KINDS[:3]:
        taught = partial(_taught, kind=kind)
        yield Artifact(f"train on a teacher's columns: cache/teacher, {kind}", taught, TRAIN, "cache/teacher")
    for name in ("exports", "exports/*.json"):
        for kind in KINDS[:3]:
            plant = partial(_in_cache, kind=kind, name=name)
            yield Artifact(f"export-hf: cache/{name}, {kind}", plant, COMMANDS["export-hf"], "", refused=None)
    yield Artifact("the cache as a whole is a link", _moved_cache, TRAIN, "", refused=False)


def _taught(place: Place, kind: str) -> None:
    teaching(place, ", top_k: 4")
    _to(place, kind, place.root / "cache" / "teacher")


def _moved_cache(place: Place) -> None:
    """A user whose other disk is larger."""
    (place.root / "cache").rename(place.root / "disk")
    (place.root / "cache").symlink_to("disk")
