"""Recipes with one flaw each that their keys do not show: `config check` or `--dry-run` must find every one.

python -m tools.flawed_recipes [--only NAME ...] [--launch]

Each is a tiny recipe that trains, changed in one place. With `--launch`, that the launch itself fails is shown too, so
that no flaw of the table is imagined.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.changes import apply
from tools.commands import asked, workplace
from tools.tables import beside

Finder = Literal["check", "dry-run"]
RECIPE: dict[str, Any] = {
    "model.name_or_path": "./model", "tokenizer.name_or_path": "byte", "data.train": "rows.jsonl",
    "data.max_length": 64, "train.duration": "1 epoch", "train.global_batch_size": 8, "train.device": "cpu",
    "logging.level": "error",
}


@dataclass(frozen=True)
class Flaw:
    """One flaw: the keys that are written otherwise, what is done to the files, who finds it, and the key it names."""

    name: str
    finder: Finder
    key: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    change: Sequence[str | Mapping[str, Any]] = ()


FLAWS = tuple(Flaw(**one) for one in beside(__file__))


def prepare(directory: Path) -> None:
    """A tiny model with weights, and rows."""
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True)).save_pretrained(directory / "model")
    rows = [{"prompt": f"{number} ", "completion": "ab" * (1 + number % 9)} for number in range(24)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_text(values: Mapping[str, Any]) -> str:
    """The tiny recipe with some keys written otherwise; None takes one away."""
    from tuner.config.yaml import flow

    sections: dict[str, list[str]] = {}
    for key, value in {**RECIPE, **values}.items():
        section, _, name = key.partition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"  {name}: {flow(value)}" if name else flow(value))
    return "".join(
        f"{section}:\n{chr(10).join(lines)}\n" if lines[0].startswith("  ") else f"{section}: {lines[0]}\n"
        for section, lines in sections.items()
    )


def found(flaw: Flaw, directory: Path, finder: Finder | Literal["launch"]) -> list[str]:
    """What `config check`, a dry run or a launch of two steps says of a flawed recipe; empty where it finds nothing."""
    from tuner.config.load import ReadRecipe, load_recipe
    from tuner.errors import RecipeError, TunerError
    from tuner.run.main import train
    from tuner.run.options import LaunchOptions
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo
    from tuner.setup.check import check_recipe

    (directory / "r.yaml").write_text(recipe_text(flaw.values))
    apply(flaw.change, directory)
    try:
        loaded = load_recipe(directory / "r.yaml", cwd=directory)
        if finder == "check":
            check_recipe(ReadRecipe(loaded, ()))
        else:
            processes = loaded.recipe.parallel.processes
            rank_info = RankInfo(0, processes, 0, processes) if isinstance(processes, int) else RankInfo()
            options = LaunchOptions(dry_run=finder == "dry-run")
            train(loaded, options, rank_info, Console(main=False))
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    except TunerError as error:
        return [error.message]
    return []


def main(words: Sequence[str] | None = None) -> int:
    """Print what finds each flaw; 1 where one is not found."""
    given = asked(
        __doc__, {}, words, only=([], "names of flaws"), launch=(False, "show that the launch fails, too"),
    )
    chosen = [flaw for flaw in FLAWS if not given.only or flaw.name in given.only]
    missed = 0
    for flaw in chosen:
        with workplace() as directory:
            os.environ["TUNER_CACHE"] = f"{directory}/cache"
            prepare(directory)
            told = found(flaw, directory, flaw.finder)
            right = len(told) == 1 and flaw.key in told[0]
            missed += not right
            said = " / ".join(told).replace(str(directory), "")
            print(f"{'ok  ' if right else 'MISS'} {flaw.finder:8} {flaw.name}: {said[:200]}")
            if given.launch and flaw.values.get("parallel.processes") is None:
                fresh = directory / "again"
                fresh.mkdir()
                prepare(fresh)
                failed = " / ".join(found(flaw, fresh, "launch")).replace(str(directory), "")
                missed += not failed
                print(f"     launch   {failed[:160] or 'MISS: it trains'}")
    print(f"found {len(chosen) - missed} of {len(chosen)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
