"""Every recipe that ships: what it needs on the card in its name, and two steps of it in small.

    python -m tools.recipes_campaign [--only NAME ...] [--small | --predict] [--smollm2 DIR] [--assets DIR]

Predicted is the recipe as it is, on the shape of its model (no weights are read) and the smallest card of the memory
that its name says: `24g` is a GPU with 24 GB, `8x80g` eight with 80 GB, `cpu` this machine. In small, the same recipe
trains for two steps on a CPU with a tiny model of the same architecture, the tokenizer of its family and rows of 1,024
tokens; what it says of its data, adapter, template and method stays. Prints a table; exits with 1 where a recipe does
not fit or train. ASSETS is filled by `tools/fetch_assets.py ASSETS`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked, environment, run, some, workplace
from tools.tables import beside
from tuner.config.load import LoadedRecipe, Override, load_recipe
from tuner.config.methods import DistillMethod
from tuner.config.shipped import shipped_recipes

CARDS = {"24g": "a10-24g", "80g": "h100-80g"}
"""The card with the least memory of each size that a recipe's name may have."""


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (model["architecture"], model["config"]) for name, model in beside(__file__).items()
}
"""The architecture and the published config of each model that a recipe names, as far as memory depends on it."""


def whole_model(name: str, place: Path) -> Path:
    """A directory with the config of a model, and no weights."""
    from transformers import AutoConfig

    kind, shape = SHAPES[name]
    path = place / "whole" / name.replace("/", "--")
    if not path.is_dir():
        AutoConfig.for_model(kind, **shape).save_pretrained(path)
    return path


def tiny_model(name: str, place: Path) -> Path:
    """A directory with a small model of the architecture, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, shape = SHAPES[name]
    path = place / "tiny" / name.replace("/", "--")
    if not path.is_dir():
        shape = shape | {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 152064,
        }  # fmt: skip
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(path)
    return path


def tiny_teacher(name: str, place: Path, tokenizer: Path) -> Path:
    """The same with a tokenizer, which a teacher must have."""
    path = place / "teachers" / name.replace("/", "--")
    if not path.is_dir():
        shutil.copytree(tiny_model(name, place), path)
        for file in tokenizer.glob("*token*.json"):
            shutil.copy(file, path)
    return path


def tokenizer_of(name: str, smollm2: Path, assets: Path) -> Path:
    """The tokenizer of a model's family: Qwen3's and Llama 3's from the assets, SmolLM2's for the others."""
    family = "qwen3" if "Qwen3" in name else "llama3" if "Llama-3" in name else None
    return smollm2 if family is None else assets / family


def target(name: str) -> tuple[str, int]:
    """The device and the processes that a recipe's name says: `x_lora_24g` -> one a10-24g."""
    words = name.rsplit("_", 1)[1]
    found = re.fullmatch(r"(?:(\d+)x)?(\d+g)", words)
    return (CARDS[found[2]], int(found[1] or 1)) if found else ("cpu", 1)


def predict_recipe(path: Path, place: Path) -> tuple[str, str]:
    """The verdict of a recipe on the card in its name, as it is settled for that, and the peak in words."""
    from tuner.profile.choose import predict_settled
    from tuner.profile.devices import find_device
    from tuner.profile.predict import Target
    from tuner.profile.report import sentence
    from tuner.runtime.dist import RankInfo

    loaded = load_recipe(path)
    model = loaded.recipe.model
    if model.name_or_path in SHAPES:
        directory = whole_model(model.name_or_path, place)
        overrides = [Override("model.name_or_path", str(directory))]
        if isinstance(loaded.recipe.method, DistillMethod):
            overrides.append(Override("method.teacher", str(whole_model(loaded.recipe.method.teacher, place))))
        loaded = load_recipe(path, overrides)
    device, processes = target(path.stem)
    found_device = find_device(device)
    where = Target(found_device, RankInfo(0, processes, 0, processes), found_device.memory_bytes)
    settled, found = predict_settled(loaded, where)
    values = ", ".join(f"{key} {value}" for key, value in settled.values.items())
    return found.verdict, f"{sentence(found)}{f' · {values}' if values else ''}"


def small(path: Path, place: Path, smollm2: Path, assets: Path) -> LoadedRecipe:
    """The recipe with all that it says, but a tiny model of its architecture, short rows, and two steps on a CPU."""
    recipe = load_recipe(path).recipe
    words = {"train.device": "cpu", "train.duration": "2 steps", "train.global_batch_size": "2"}
    words |= {"eval.samples": "0", "eval.at_start": "false"}
    words |= {"output_dir": str(place / "runs" / path.stem), "data.cache_dir": str(place / "cache")}
    name = recipe.model.name_or_path
    if name in SHAPES:
        words["model.name_or_path"] = str(tiny_model(name, place))
        words["tokenizer.name_or_path"] = str(tokenizer_of(name, smollm2, assets))
        words |= {"data.max_length": "1K", "train.precision": "fp32"}
        if isinstance(recipe.method, DistillMethod):
            teacher = recipe.method.teacher
            words["method.teacher"] = str(tiny_teacher(teacher, place, tokenizer_of(teacher, smollm2, assets)))
    if recipe.parallel.processes != "auto":
        words["parallel.processes"] = str(min(2, int(recipe.parallel.processes)))
    return load_recipe(path, [Override(key, text) for key, text in words.items()])


def train_small(path: Path, place: Path, smollm2: Path, assets: Path) -> tuple[bool, str]:
    """Train a recipe in small with the real command, in a process of its own; its last line where it fails."""
    from tuner.config.load import recipe_yaml

    recipe = place / f"{path.stem}.yaml"
    recipe.write_text(recipe_yaml(small(path, place, smollm2, assets).recipe), encoding="utf-8")
    done = run(["-m", "tuner", "train", str(recipe), "--json"], place, environment(threads=None))
    if done.returncode:
        return False, done.stderr.strip().splitlines()[-1]
    metrics = json.loads(done.stdout)["metrics"]
    return True, f"loss {metrics['loss']:.3f}, {metrics['trained_tokens']:,} of {metrics['tokens']:,} tokens trained"


def main() -> int:
    """Print the table."""
    recipes = shipped_recipes()
    options = asked(
        __doc__, only=some(recipes), small=(False, "train in small alone"), predict=(False, "predict alone"),
        smollm2=ROOT / ".demo" / "smollm2", assets=ROOT / ".demo" / "assets",
    )
    bad = 0
    with workplace() as place:
        for name in options.only:
            if not options.small:
                verdict, said = predict_recipe(recipes[name], place)
                bad += verdict == "does not fit"
                print(f"{name:42} {' x '.join(map(str, reversed(target(name)))):14} {verdict:12} {said}", flush=True)
            if not options.predict:
                good, said = train_small(recipes[name], place, options.smollm2.absolute(), options.assets.absolute())
                bad += not good
                print(f"{name:42} {'in small':14} {'trained' if good else 'FAILED':12} {said}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
