"""`tuner import` over the configurations that other tools ship: what is converted, what is not, and what trains.

python -m tools.import_campaign [--sources DIRECTORY] [--train N] [--left]

Fetches axolotl, LLaMA-Factory, torchtune, TRL and ms-swift from the package index (about 15 MB, nothing is installed),
converts every training configuration in them, and the training commands that the READMEs of TRL and ms-swift show,
and trains two steps of some, and of each that learns from preferences, with a tiny model and rows of ours in place of
theirs.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.commands import ROOT, asked, workplace
from tools.flawed_recipes import prepare
from tuner.config.imported import Imported, import_text
from tuner.config.load import Override, RecipeText, load_recipe
from tuner.config.other_configs import Tool, is_script
from tuner.config.other_methods import PREFERENCES
from tuner.errors import TunerError

PACKAGES: dict[str, tuple[str, ...]] = {
    "axolotl==0.19.0": ("--no-build-isolation", "--no-binary", "axolotl"),
    "llamafactory==0.9.5": ("--no-binary", "llamafactory"), "torchtune==0.6.1": (),
    "trl==1.16.0": ("--no-binary", "trl"), "ms-swift==4.6.0": ("--no-binary", "ms-swift"),
}
READMES: tuple[tuple[Tool, str], ...] = (("trl", "trl-*/README.md"), ("ms-swift", "ms_swift-*/README.md"))
"""Pages that show commands: these packages hold no file of a configuration."""
CONFIGS: tuple[tuple[Tool, str], ...] = (
    ("axolotl", "axolotl-*/examples/**/*.y*ml"),
    ("llama-factory", "llamafactory-*/examples/train_*/*.yaml"),
    ("llama-factory", "llamafactory-*/examples/extras/**/*.yaml"),
    ("torchtune", "torchtune-*/recipes/configs/*/*.yaml"),
)
NOT_TRAINING = ("deepspeed", "accelerate", "inference", "eval", "quantiz", "export", "generate", "cloud", "tokens_cfg",
                "ray", "predict", "evaluation", "fsdp_", "preprocess", "dev/", "vllm", "nlg_eval", "mm.y")  # fmt: skip
REPLACED = {
    "model.name_or_path": "./model", "tokenizer.name_or_path": "byte", "data.train": "rows.jsonl", "data.eval": "null",
    "data.max_length": "64", "train.duration": "2 steps", "train.global_batch_size": "2", "train.micro_batch_size": "1",
    "train.device": "cpu", "train.precision": "fp32", "eval.every": "null", "checkpoint.keep_best": "null",
    "method.kind": "null", "output_dir": "out", "logging.trackers": "null", "tokenizer.chat_template": "null",
    "tokenizer.add_tokens": "null", "model.kernels": "null", "model.config": "null", "train.compile": "false",
    "adapter.modules_to_save": "null", "parallel.processes": "1", "model.freeze": "null", "schedule.warmup": "never",
    "logging.level": "error", "train.tf32": "false",
}  # fmt: skip
"""What a tiny run has in place of what the recipe says: the model, the data, the size and the device."""


def fetch(directory: Path, packages: Mapping[str, tuple[str, ...]]) -> None:
    """Download and unpack packages, each with its options of pip, where they are not there."""
    directory.mkdir(parents=True, exist_ok=True)
    for package, options in packages.items():
        name = package.partition("==")[0]
        files = f"{name.replace('-', '_')}-*"
        if any(path.is_dir() for path in directory.glob(files)):
            continue
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, package, "-d", str(directory)]
        subprocess.run(command, check=True)
        for path in directory.glob(files):
            if path.suffix == ".whl":
                zipfile.ZipFile(path).extractall(directory / path.stem)
            elif path.name.endswith(".tar.gz"):
                with tarfile.open(path) as archive:
                    archive.extractall(directory, filter="data")


def commands(directory: Path) -> Iterator[tuple[Tool, Path]]:
    """Every block of a README that runs a training, saved as a script beside it."""
    for tool, pattern in READMES:
        for page in sorted(directory.glob(pattern)):
            blocks = re.findall(r"^```(?:bash|shell)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
            for number, block in enumerate(blocks):
                if is_script(block, page.name):
                    path = page.with_name(f"README-{number}.sh")
                    path.write_text(block, encoding="utf-8")
                    yield tool, path


def configs(directory: Path) -> Iterator[tuple[Tool, Path]]:
    """Every training configuration."""
    yield from commands(directory)
    for tool, pattern in CONFIGS:
        for path in sorted(directory.glob(pattern)):
            if path.is_file() and not any(word in str(path.relative_to(directory)) for word in NOT_TRAINING):
                yield tool, path


def preferences(kind: str, directory: Path) -> dict[str, str]:
    """Rows for a method that learns from preferences, and what a run of it has in place of its recipe's."""
    if kind not in PREFERENCES:
        return {}
    turns = [{"prompt": f"say {word}", "chosen": word, "rejected": f"no {word}"} for word in ("one", "two", "six")]
    unpaired = [{"prompt": turn["prompt"], "completion": turn["chosen"], "label": turn != turns[0]} for turn in turns]
    lines = [json.dumps(row) for row in (unpaired if kind == "kto" else turns)]
    (directory / "preferences.jsonl").write_text("\n".join(lines * 2) + "\n", encoding="utf-8")
    return {"method.kind": "", "data.train": "preferences.jsonl"}


def train(found: Imported, directory: Path) -> str | None:
    """Train two steps of a recipe in small; what is wrong with it, or None."""
    from tuner.run.main import train as launch
    from tuner.run.options import LaunchOptions
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    replaced = REPLACED | preferences(found.recipe.method.kind, directory)
    flags = [Override(key, value) for key, value in replaced.items() if value]
    if found.recipe.adapter.kind != "none":
        flags.append(Override("adapter.target_modules", "all-linear"))
    else:
        flags = [flag for flag in flags if not flag.key.startswith("adapter.")]
    flags = [flag for flag in flags if flag.key != "schedule.warmup" or found.recipe.schedule.kind != "custom"]
    try:
        loaded = load_recipe(RecipeText(found.text, "imported"), flags, directory)
        result = launch(loaded, LaunchOptions(), RankInfo(), Console(main=False))
    except TunerError as error:
        return error.message
    return None if result.step == 2 else f"{result.step} steps"


def main(words: Sequence[str] | None = None) -> int:
    """Print what became of every configuration; 1 where one cannot be converted or a converted one does not train."""
    given = asked(
        __doc__, {}, words, sources=(ROOT / ".demo" / "other-tools", "where they are unpacked"),
        train=(3, "how many of each tool train"), left=(False, "print what was not carried over, by how often"),
    )
    fetch(given.sources, PACKAGES)
    left: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = {}
    failed = 0
    with workplace() as name:
        for tool, path in configs(given.sources):
            count = counts.setdefault(tool, Counter())
            count["files"] += 1
            try:
                found = import_text(path.read_text(encoding="utf-8"), path.name, directory=path.parent)
            except TunerError as error:
                refused = "not supported" in error.message
                count["refused"] += refused
                failed += not refused
                verdict = "refused" if refused else "not converted"
                print(f"{verdict}  {path.relative_to(given.sources)}: {error.message[:150]}")
                continue
            count["converted"] += 1
            count["of their tool"] += found.tool == tool
            left.update(item.split(":")[0] for item in found.left if "no counterpart" in item)
            if found.tool != tool:
                print(f"taken for {found.tool}  {path.relative_to(given.sources)}")
            is_preference = found.recipe.method.kind in PREFERENCES
            count["of preferences"] += is_preference
            if is_preference or count["trained"] + count["failed"] < given.train:
                directory = name / f"{tool}-{count['files']}"
                directory.mkdir()
                os.environ["TUNER_CACHE"] = f"{name}/cache"
                prepare(directory)
                problem = train(found, directory)
                count["failed" if problem else "trained"] += 1
                failed += problem is not None
                if problem:
                    print(f"does not train  {path.relative_to(given.sources)}: {problem}")
    for tool, count in counts.items():
        print(f"{tool:14} " + ", ".join(f"{number} {what}" for what, number in count.items() if number))
    if given.left:
        print("without counterpart: " + ", ".join(f"{key} ({number})" for key, number in left.most_common(60)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
