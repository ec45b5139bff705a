"""Layouts of processes: their names, those that a recipe may use, and the one that it asks for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

from tuner.config.load import load_recipe, recipe_dict
from tuner.config.recipe import ParallelSection, Recipe
from tuner.errors import RecipeError
from tuner.runtime.dist import RankInfo

MOST = 4
"""Processes of the largest layout that is proven: a larger one is proven by its axes, each as small as it can be."""
KNOWN = (
    "none2", "fsdp2", "fsdp4", "hsdp2x2", "tp2", "tp4", "fsdp2+tp2", "hsdp2x1+tp2", "sp2", "sp4", "fsdp2+sp2",
    "tp2+sp2", "ep2", "ep4", "fsdp2+ep2", "hsdp2x1+ep2",
)  # fmt: skip
"""Every kind of layout that few processes can show, in the order in which they are proven."""
_PART = re.compile(r"(none|fsdp|tp|sp|ep)(\d{1,3})|hsdp(\d{1,3})x(\d{1,3})")
_FORM = "parts with their sizes, such as none2, fsdp4, hsdp2x2, tp2, sp2 or ep2, joined by +: fsdp2+tp2"


@dataclass(frozen=True)
class Layout:
    """How processes are laid out. All sizes multiply to the number of processes."""

    replicas: int = 1
    """Copies of the model, each on a machine of its own as far as the mesh knows."""
    shards: int = 1
    """Groups of processes that differ in their rows; with ``whole``, each holds all weights."""
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    whole: bool = False
    """`parallel.shard: none`."""

    @property
    def name(self) -> str:
        """The parts with their sizes, as :func:`parse` reads them."""
        sizes = {"tp": self.tensor, "sp": self.sequence, "ep": self.expert}
        named = [f"{key}{size}" for key, size in sizes.items() if size > 1]
        rows = f"hsdp{self.replicas}x{self.shards}" if self.replicas > 1 else f"fsdp{self.shards}"
        if self.whole or self.replicas > 1 or self.shards > 1 or not named:
            named.insert(0, f"none{self.shards}" if self.whole else rows)
        return "+".join(named)

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.replicas * self.shards * self.tensor * self.sequence * self.expert

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a step are divided."""
        return self.replicas * self.shards * self.expert

    @property
    def section(self) -> dict[str, Any]:
        """What a recipe writes for it under `parallel`, besides the number of processes of a machine."""
        shard = "auto" if self == ALONE else "none" if self.whole else "hybrid" if self.replicas > 1 else "full"
        sizes = {"tensor": self.tensor, "sequence": self.sequence, "expert": self.expert}
        return {"shard": shard, **sizes, "replicas": None, "offload": "none"}  # which changes no bit

    def rank_info(self, rank: int) -> RankInfo:
        """One of its processes: a copy of the model is on one machine."""
        local = self.processes // self.replicas
        return RankInfo(rank, self.processes, rank % local, local)


def parse(name: str) -> Layout:
    """The layout of a name. Raises RecipeError."""
    sizes: dict[str, int] = {}
    for part in name.split("+"):
        match = _PART.fullmatch(part)
        if match is None or 0 in (numbers := [int(number) for number in match.groups()[1:] if number]):
            raise RecipeError(f"--layouts: {name!r} is no layout", hint=f"a layout is {_FORM}")
        keys = (match[1],) if match[1] else ("replicas", "fsdp")
        if sizes.keys() & set(keys):
            raise RecipeError(f"--layouts: {name!r} has one axis twice", hint=f"a layout is {_FORM}")
        sizes |= zip(keys, numbers, strict=True)
    if "none" in sizes and sizes.keys() & {"fsdp", "replicas"}:
        raise RecipeError(f"--layouts: {name!r} both shards weights and does not", hint="leave none or fsdp out")
    axes = {key: sizes.get(short, 1) for key, short in (("tensor", "tp"), ("sequence", "sp"), ("expert", "ep"))}
    shards = sizes.get("none", sizes.get("fsdp", 1))
    return Layout(sizes.get("replicas", 1), shards, **axes, whole="none" in sizes)


def own_layout(section: ParallelSection) -> Layout | None:
    """The layout that a recipe asks for, with at most :data:`MOST` processes; None where it asks for none.

    What is larger is divided, the largest axis first, by its smallest prime factor: each axis above 1 stays above 1
    as long as it can.
    """
    axes = {"tensor": section.tensor, "sequence": section.sequence, "expert": section.expert}
    group = prod(axes.values())
    written = section.processes != "auto" or section.shard in {"full", "hybrid", "none"}
    if not written and group == 1:
        return None
    processes = group if section.processes == "auto" else int(section.processes)
    rows = MOST if section.processes == "auto" and group == 1 else max(processes // group, 1)
    sizes = {"rows": rows, **axes}
    while prod(sizes.values()) > MOST:
        largest = max(sizes, key=lambda key: sizes[key])
        sizes[largest] //= next(factor for factor in count(2) if sizes[largest] % factor == 0)
    rows = sizes.pop("rows")
    if prod((rows, *sizes.values())) == 1:
        return None
    replicas = 2 if section.shard == "hybrid" and rows % 2 == 0 else 1
    return Layout(replicas, rows // replicas, **sizes, whole=section.shard == "none")


def layouts_of(section: ParallelSection, asked: Sequence[str]) -> list[Layout]:
    """The layouts to prove, each once: the recipe's own first, then the known ones; or those that were asked for."""
    own = None if asked else own_layout(section)
    return list(dict.fromkeys([*([] if own is None else [own]), *map(parse, asked or KNOWN)]))


def laid_out(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe with a layout in place of its own. Raises RecipeError where a rule of recipes refuses it."""
    plain = recipe_dict(recipe)
    plain["parallel"] |= layout.section | {"processes": layout.processes // layout.replicas}
    return load_recipe(plain).recipe


ALONE = Layout()
"""One process."""
