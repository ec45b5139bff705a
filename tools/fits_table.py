"""What fits where: models from 1B to 70B, in full and as adapters, on one and eight devices of 16 to 141 GB.

    python -m tools.fits_table run [--only TEXT] [--workers 2]   # predicts what is missing into tools/fits.json
    python -m tools.fits_table check --cells 12 --seed 7         # cells predicted again, whole and quickly
    python -m tools.fits_table page                              # writes docs/fits.md from tools/fits.json

Each cell is what `tuner profile --fit` finds for a recipe: chosen by predictions of models with fewer layers, confirmed
by one of the whole model, whose figures it shows. `check` predicts drawn cells both ways, and says how far the quick
prediction is from the whole one. Nothing of it has been compared with a GPU.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.commands import ROOT, asked, one_of, workplace
from tools.tables import beside
from tuner.config.load import load_recipe, recipe_dict
from tuner.config.recipe import Recipe
from tuner.profile import fit, search
from tuner.profile.devices import find_device
from tuner.profile.fit import Way, ways_of
from tuner.profile.predict import Target, predict, predict_by_layers
from tuner.profile.prediction import Prediction
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.setup.settled import changed

FIGURES, PAGE = ROOT / "tools" / "fits.json", ROOT / "docs" / "fits.md"


_TABLE: dict[str, Any] = beside(__file__)
MODELS, METHODS, DEVICES, SHORT = (_TABLE[name] for name in ("models", "methods", "devices", "short"))
COUNTS, LENGTHS = (1, 8), (4096,)
SHORT_ROWS = (512, 1024)
"""Of one device, from the smallest one up to the first that they fit."""
MOST_OFF = 0.02
PLAIN = {"gradient_checkpointing": "none", "micro_batch_size": 1, "offload_activations": False, "tiled_mlp": False}
LEVEL, SHARD = "train.gradient_checkpointing", "parallel.shard"


@dataclass(frozen=True)
class Cell:
    """One recipe on one kind of machine."""

    model: str
    method: str
    length: int
    memory: str
    count: int

    @property
    def name(self) -> str:
        """The cell in a line."""
        return f"{self.model}, {self.method}, rows of {self.length:,}, {self.count} x {self.memory}"

    def recipe(self, directory: Path) -> Recipe:
        """The recipe, its model a config in a directory."""
        base = directory / self.model.split()[0]
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps(MODELS[self.model]))
        method = METHODS[self.method]
        tree = {
            "data": {"train": "rows.jsonl", "max_length": self.length},
            "train": {**PLAIN, "global_batch_size": 32, "precision": "bf16"}, "checkpoint": {"async_save": False},
            **method, "model": {"name_or_path": str(base), **method.get("model", {})},
        }
        return load_recipe(tree).recipe

    def target(self) -> Target:
        """The machine: all the memory of its devices, and their share of its host's."""
        device = find_device(DEVICES[self.memory])
        return Target(device, RankInfo(0, self.count, 0, self.count), device.memory_bytes)


class Remembered:
    """Predictions by recipe and machine, for cells that differ in the size of the memory alone."""

    def __init__(self, made: Callable[..., Prediction]) -> None:
        self._made, self._known = made, dict[str, Prediction]()

    def __call__(self, recipe: Recipe, target: Target, *options: Any) -> Prediction:
        machine = [target.device.kind, target.device.generation, asdict(target.rank_info)]
        key = json.dumps([recipe_dict(recipe), machine], sort_keys=True)
        if key not in self._known:
            self._known[key] = self._made(recipe, target, *options)
        return replace(
            self._known[key], device=target.device.shown, limit_bytes=target.limit_bytes,
            host_limit_bytes=target.host_limit_bytes,
        )  # fmt: skip


def _cell(line: dict[str, Any]) -> Cell:
    return Cell(**{name: line[name] for name in Cell.__dataclass_fields__})


def cells() -> Iterator[Cell]:
    """All cells, those next to each other that share predictions."""
    for model in MODELS:
        for method in METHODS:
            for count in COUNTS:
                for length in (*SHORT_ROWS, *LENGTHS) if count == 1 else LENGTHS:
                    yield from (Cell(model, method, length, memory, count) for memory in DEVICES)


def own_ways(recipe: Recipe) -> Iterator[Way]:
    """Of the ways of a recipe those of its cell: other rows and adapters are other cells."""
    for changes, tradeoff in ways_of(recipe):
        if not changes and not tradeoff.last_resort and "model.quantize" not in tradeoff.values:
            yield changes, tradeoff


def figures_of(cell: Cell, directory: Path) -> dict[str, Any]:
    """What fits in a cell, as plain values."""
    with patch.object(fit, "ways_of", own_ways):
        found = fit.fit(cell.recipe(directory), cell.target())
    best = found.choices[0]
    said = best.prediction
    return {
        **asdict(cell), "fits": best.fits, "overrides": dict(best.overrides),
        "peak_gib": round(said.peak_bytes / 2**30, 2), "host_gib": round(said.host_bytes / 2**30, 2),
        "tok_per_s": round(said.time.tok_per_s / cell.count), "changes_results": sorted(found.changes),
        "predictions": found.predictions,
    }


def run_group(group: list[Cell]) -> list[dict[str, Any]]:
    """The figures of cells that share predictions."""
    quick, whole = Remembered(predict_by_layers), Remembered(predict)
    with patch.object(search, "predict_by_layers", quick), patch.object(search, "predict", whole), workplace() as name:
        lines = []
        for cell in group:
            began = time.monotonic()
            lines.append(figures_of(cell, name))
            print(f"{time.monotonic() - began:6.1f} s  {cell.name}: {text_of(lines[-1])}", flush=True)
            if cell.length in SHORT_ROWS and lines[-1]["fits"]:
                break
        return lines


def _each(groups: Iterable[list[Cell]], workers: int) -> Iterator[list[dict[str, Any]]]:
    """The figures of each group, by one process or several."""
    if workers == 1:
        yield from map(run_group, groups)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_group, groups)


def text_of(line: dict[str, Any]) -> str:
    """A cell in words."""
    if not line["fits"]:
        return "does not fit"
    given, said = line["overrides"], list[str]()
    rows = given.get("train.micro_batch_size", 1)
    said.append(f"{rows} row{'' if rows == 1 else 's'}")
    if LEVEL in given:
        said.append(f"{given[LEVEL]} recompute")
    said += [SHORT[key] for key in given if key in SHORT and key != "train.micro_batch_size"]
    if SHARD in given:
        said.append("one copy each" if given[SHARD] == "none" else "sharded")
    host = f" + {line['host_gib']:.0f} of the host" if line["host_gib"] >= 1 else ""
    return f"{', '.join(said)}: {line['peak_gib']:.1f} GiB{host}, {line['tok_per_s']:,} tok/s"


def page(lines: list[dict[str, Any]]) -> str:
    """The page of documentation."""
    head = (ROOT / "tools" / "fits_head.md").read_text()
    found = [head.rstrip(), ""]
    by_cell = {_cell(line): line for line in lines}
    for count in COUNTS:
        found += [f"## {'One device' if count == 1 else f'{count} devices of one machine'}", ""]
        found.append(f"| model | trained | rows | {' | '.join(DEVICES)} |")
        found.append("| --- " * (3 + len(DEVICES)) + "|")
        for model in MODELS:
            for method in METHODS:
                for length in LENGTHS:
                    row = [by_cell.get(Cell(model, method, length, memory, count)) for memory in DEVICES]
                    if None not in row:  # else it is not predicted yet
                        texts = [text_of(line) for line in row if line is not None]
                        found.append(f"| {model} | {method} | {length:,} | {' | '.join(texts)} |")
        found.append("")
    return "\n".join([*found, *_short_rows(by_cell)]).rstrip() + "\n"


def _short_rows(by_cell: dict[Cell, dict[str, Any]]) -> list[str]:
    """The smallest device for rows that are shorter than the table's."""
    found = ["## Short rows: the smallest device", ""]
    found += [f"| model | trained | {' | '.join(f'rows of {length:,}' for length in SHORT_ROWS)} |"]
    found += ["| --- | --- | --- | --- |"]
    for model in MODELS:
        for method in METHODS:
            row = []
            for length in SHORT_ROWS:
                each = {memory: by_cell.get(Cell(model, method, length, memory, 1)) for memory in DEVICES}
                smallest = next((f"**{memory}**: {text_of(line)}" for memory, line in each.items() if fits(line)), None)
                if smallest is None and None not in each.values():
                    smallest = "none of these"
                row.append(smallest)
            if None not in row:
                found.append(f"| {model} | {method} | {' | '.join(filter(None, row))} |")
    return found


def fits(line: dict[str, Any] | None) -> bool:
    """Whether a cell was predicted, and fits."""
    return line is not None and bool(line["fits"])


def check(lines: list[dict[str, Any]], count: int, seed: int) -> int:
    """Predict drawn cells again.

    Returns how many have another peak, no longer fit, or are predicted from fewer layers more than `MOST_OFF` off.
    """
    drawn = random.Random(seed).sample([line for line in lines if line["fits"]], count)
    wrong = 0
    with workplace() as name:
        for line in drawn:
            cell = _cell(line)
            recipe = changed(cell.recipe(name), line["overrides"])
            layers = MODELS[cell.model]["num_hidden_layers"]
            whole, quick = predict(recipe, cell.target()), predict_by_layers(recipe, cell.target(), layers)
            is_another = round(whole.peak_bytes / 2**30, 2) != line["peak_gib"]
            off = quick.peak_bytes / whole.peak_bytes - 1
            bad = is_another or abs(off) > MOST_OFF or whole.verdict != "fits"
            wrong += bad
            said = f"quick {off:+.2%}, whole {gib(whole.peak_bytes)}, {whole.verdict}"
            print(f"{'WRONG' if bad else 'ok':5} {said}; {cell.name}: {text_of(line)}", flush=True)
    print(f"{count} cells, {wrong} wrong")
    return wrong


def main() -> int:
    """Run, check or write the page."""
    options = asked(
        __doc__, {"what": one_of(("run", "check", "page"))}, only=("", "cells whose name holds this alone"), workers=1,
        again=(False, "predict cells that are there, too"), cells=12, seed=7,
    )
    lines = json.loads(FIGURES.read_text()) if FIGURES.is_file() else []
    if options.what == "page":
        PAGE.write_text(page(lines))
        return 0
    if options.what == "check":
        return bool(check(lines, options.cells, options.seed))
    wanted = [cell for cell in cells() if options.only in cell.name]
    known = {_cell(line).name: line for line in lines}
    done = {name.rpartition(",")[0] for name, line in known.items() if line["fits"] and line["length"] in SHORT_ROWS}
    wanted = [cell for cell in wanted if options.again or cell.name.rpartition(",")[0] not in done]
    groups: dict[tuple[str, str, int, int], list[Cell]] = {}
    for cell in (cell for cell in wanted if options.again or cell.name not in known):
        groups.setdefault((cell.model, cell.method, cell.count, cell.length), []).append(cell)
    for found in _each(groups.values(), options.workers):
        known |= {_cell(line).name: line for line in found}
        kept = [json.dumps(known[cell.name]) for cell in cells() if cell.name in known]
        FIGURES.write_text("[\n" + ",\n".join(kept) + "\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
