"""What of a recipe can be checked without training: its files, its templates, and what it names of the model.

`config check` asks for all of it, with the model's config where that is on this machine. Nothing of the user's own is
run, nothing is fetched, and nothing is written.
"""

import os
import re
import symtable
from collections.abc import Iterator
from importlib import metadata
from importlib.util import decode_source
from pathlib import Path
from typing import Any

import numpy as np

from tuner.config.load import ReadRecipe
from tuner.config.methods import DistillMethod
from tuner.config.optimizers import rounds_stochastically
from tuner.config.recipe import DataSource, PeftAdapter, Recipe
from tuner.config.schedules import CustomSchedule
from tuner.data.encoding.template import ChatTemplate
from tuner.data.encoding.tokenizer_files import holds_tokenizer, without_files
from tuner.data.sources import expand
from tuner.errors import DataError, RecipeError
from tuner.rundir.layout import RECORD
from tuner.runtime.files import read_json, reading
from tuner.setup.findings import Findings
from tuner.setup.settled import AXES, in_groups, rows_at_once, sharing, with_whole_batches
from tuner.train.plan import Plan, schedule_flaws

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = 1000
"""Steps that stand for a run whose length is not known."""
_STAR = re.compile(r"^\s*from\s[^#]*\simport\s*\*", re.MULTILINE)
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt")


def check_recipe(read: ReadRecipe) -> str:
    """Check everything that can be; return in words what was checked. Raises RecipeError with all problems.

    What is right of a recipe is checked even where some of its keys are wrong. torch is imported only where the model's
    config is on this machine and has no problem so far, and for an adapter by peft's config, whose fields peft knows.
    """
    loaded = read.whole() if read.loaded is None else read.loaded
    found = Findings(loaded, read.problems, read.hint)
    recipe = loaded.recipe
    of_batch = with_whole_batches(loaded, recipe.parallel.processes) if recipe.parallel.processes != "auto" else loaded
    _check_values(of_batch.recipe, found)
    check_files(recipe, found)
    if isinstance(recipe.adapter, PeftAdapter) and found.sound("adapter"):
        from tuner.model.peft_kinds import flaws

        for flaw in flaws(recipe.adapter.config):
            found.add(*flaw)
    directory = local_model(recipe)
    checked = "keys, files, templates, code"
    if directory is None:
        found.raise_any()
        return f"{checked}; layer names are not checked: {recipe.model.name_or_path} is not on this machine"
    apart = None
    if not found.has("model") and not found.has("adapter"):
        from tuner.setup.check_model import check_model

        apart = check_model(recipe, directory, found)
    found.raise_any()
    end = f"; {apart}" if apart else ""
    return f"{checked}, and layer names in {Path(recipe.model.name_or_path).name}{end}"


def schedule_warnings(recipe: Recipe) -> list[str]:
    """What of the schedule does not fit the run, as far as its length is known without the data."""
    section, duration = recipe.schedule, recipe.train.duration
    if isinstance(section, CustomSchedule) or recipe.data.portions:
        return []
    is_known = duration.unit == "steps"
    spans = [section.warmup, getattr(section, "decay", None), *getattr(section, "periods", ())]
    if not {span.unit for span in spans if span is not None} <= ({"steps", "%"} if is_known else {"%"}):
        return []
    plan = Plan(1, 1, 1, int(duration.count) if is_known else PARTS)
    return schedule_flaws(section, plan, np.ones(1, dtype=np.int64), is_known)


def _check_values(recipe: Recipe, found: Findings) -> None:
    """Check values that a launch refuses, on any machine, once every `auto` is resolved."""
    model, train, frozen = recipe.model, recipe.train, recipe.adapter.kind != "none"
    kinds = found.sound("adapter", "model.dtype")
    if model.dtype == "bf16" and not frozen and kinds and not rounds_stochastically(recipe.optimizer):
        text = "trained weights are kept in fp32, unless their updates are rounded stochastically"
        found.add("model.dtype", text, "write dtype: auto, or optimizer.rounding: stochastic")
    if model.dtype == "bf16" and train.precision == "fp32" and kinds:
        found.add("model.dtype", "bf16 weights cannot be computed with in train.precision: fp32", "write dtype: auto")
    if (model.kernels, train.device) in {("liger", "cpu"), ("native", "cuda")}:
        found.add("model.kernels", f"{model.kernels} kernels are not for train.device: {train.device}", "write auto")
    _check_processes(recipe, found)


def _check_processes(recipe: Recipe, found: Findings) -> None:
    """Check a written number of processes against the groups that share rows, and against the global batch."""
    processes, shared, parallel = recipe.parallel.processes, sharing(recipe.parallel), recipe.parallel
    if not isinstance(processes, int) or not found.sound("parallel"):
        return
    group = max(shared, parallel.tensor * parallel.expert)
    if processes % group:
        what = " times ".join(f"parallel.{key}" for key in AXES if getattr(parallel, key) > 1)
        text = f"{processes} processes do not divide into groups of {group} ({what})"
        found.add("parallel.processes", text, f"write a multiple of {group}")
        return
    micro, there = rows_at_once(recipe.train), processes // shared
    rows = recipe.train.global_batch_size // micro
    if rows % there and found.sound("train.global_batch_size", "train.micro_batch_size"):
        good = ", ".join(str(count * shared) for count in range(1, min(rows, 64) + 1) if rows % count == 0)
        groups = in_groups(recipe.parallel, processes) + (", each" if shared > 1 else "")
        text = f"{recipe.train.global_batch_size} rows do not divide into {groups} of {micro}"
        found.add("parallel.processes", text, f"numbers that divide it: {good}")


def local_model(recipe: Recipe) -> Path | None:
    """The directory of the recipe's model where it is on this machine: as written, or in the hub's cache."""
    name = recipe.model.name_or_path
    if os.path.isabs(name):
        return Path(name)
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json", revision=recipe.model.revision)
    except (errors.HFValidationError, OSError):
        return None
    return Path(config).parent if isinstance(config, str) else None


def check_files(recipe: Recipe, found: Findings) -> None:
    """Check every path and every name of the user's code. Reads no records and no weights."""
    _check_model_files(recipe, found)
    _check_tokenizer(recipe, found)
    for key, source in _sources(recipe):
        if recipe.data.portions is None or not recipe.data.portions.may_come_later(source):
            found.check(f"{key}.path", _check_source, source)
    for key, use, group in _own_code(recipe):
        found.check(key, _check_code, use, group)
    for key, path in (("output_dir", recipe.output_dir), ("data.cache_dir", recipe.data.cache_dir)):
        if path is not None:
            found.check(key, _check_writable, Path(path))


def _sources(recipe: Recipe) -> Iterator[tuple[str, DataSource]]:
    """The sources of data, each with its key."""
    for split in ("train", "eval"):
        sources = getattr(recipe.data, split)
        for number, source in enumerate(sources if isinstance(sources, tuple) else ()):
            yield f"data.{split}.{number}", source


def _check_model_files(recipe: Recipe, found: Findings) -> None:
    has_weights = recipe.model.init == "pretrained"
    _check_model_directory("model.name_or_path", recipe.model.name_or_path, has_weights, found)
    for number, entry in enumerate(recipe.model.init_from):
        if not Path(entry.path).is_dir():
            hint = "give a run, a checkpoint, an export, or the directory of a model or adapter"
            found.add(f"model.init_from.{number}.path", f"{entry.path}: no such directory", hint)
    if isinstance(recipe.method, DistillMethod):
        _check_teacher(recipe.method, found)


def _check_teacher(method: DistillMethod, found: Findings) -> None:
    teacher = method.teacher
    if method.teacher_every is not None:
        from tuner.setup.teacher import newest_teacher  # with the classes of models

        try:
            teacher = str(newest_teacher(Path(teacher)))
        except RecipeError as error:
            found.add("method.teacher", error.message.removeprefix("method.teacher: "), error.hint)
            return
    _check_model_directory("method.teacher", teacher, True, found)


def _check_model_directory(key: str, name: str, has_weights: bool, found: Findings) -> None:
    if not os.path.isabs(name):
        return
    directory = Path(name)
    if not directory.is_dir():
        found.add(key, f"{name}: no such directory", "give a hub name (owner/name) or a directory with config.json")
    elif (directory / RECORD).is_file():
        found.add(key, f"{name} is a run", f"export it first: tuner export-hf {name}, and name the export")
    elif (directory / "adapter_config.json").is_file():
        found.add(key, f"{name} is an adapter's directory", "merge it first: tuner export-hf RUN, and name the export")
    elif not (directory / "config.json").is_file():
        found.add(key, f"{name}: the directory has no config.json")
    else:
        with found.of(key):
            read_json(directory / "config.json")
            if has_weights:
                _check_weights(directory)


def _check_weights(directory: Path) -> None:
    """Check that the weights are there, as safetensors. Raises DataError, RecipeError."""
    index = directory / INDEX
    if index.is_file() and not (directory / WEIGHTS).is_file():
        names = read_json(index).get("weight_map")
        if missing := sorted({name for name in dict(names or {}).values() if not (directory / name).is_file()}):
            raise DataError(f"{index}: {missing[0]} is not there", hint="download the model again")
        return
    if any(directory.glob("*.safetensors")):
        return
    if any((directory / name).is_file() for name in _PICKLES):
        said = f"{directory}: its weights are pickled, which are never loaded"
        raise DataError(said, hint="convert them to safetensors")
    raise DataError(f"{directory}: holds no weights ({WEIGHTS})", hint="write model.init: random to train from nothing")


def _check_tokenizer(recipe: Recipe, found: Findings) -> None:
    section = recipe.tokenizer
    name = section.name_or_path or recipe.model.name_or_path
    if name != "byte" and os.path.isabs(name) and not found.has("model"):
        key = "tokenizer.name_or_path" if section.name_or_path else "model.name_or_path"
        if not Path(name).is_dir():
            found.add(key, f"{name}: no such directory", "give a hub name, a directory or byte")
        elif not holds_tokenizer(Path(name)):
            found.add(key, f"{name}: holds no tokenizer", without_files(section.name_or_path is not None))
    template = section.chat_template
    if template is not None and os.path.isabs(template):
        found.check("tokenizer.chat_template", _check_template, Path(template))


def _check_template(path: Path) -> None:
    try:
        with reading(path, "no such file"):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    ChatTemplate(text, {}, name=f"{path}: the chat template")


def _check_source(source: DataSource) -> None:
    """Check that the files of a source are there. Hub data sets and standard input are left to the preparation."""
    if not os.path.isabs(source.path):
        return
    files = expand([source])
    if all(file.size() == 0 for file in files):
        raise DataError(f"{source.path}: empty")


def _own_code(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Key, name and group of entry points of each piece of the user's code."""
    named: list[tuple[str, Any, str]] = [
        *((name, getattr(recipe, name), f"{name}s") for name in ("tokenizer", "method", "optimizer", "schedule")),
        *((f"hooks.{number}", hook, "hooks") for number, hook in enumerate(recipe.hooks)),
        *((key, source, "data_sources") for key, source in _sources(recipe)),
    ]
    for key, section, group in named:
        if (use := getattr(section, "use", None)) is not None:
            yield f"{key}.use", use, f"tuner.{group}"


def _check_code(use: str, group: str) -> None:
    """Check that a file parses and defines a name, or that an entry point is declared; nothing is run."""
    file, colon, name = use.rpartition(":")
    if not (colon and file.endswith(".py")):
        declared = sorted({point.name for point in metadata.entry_points(group=group)})
        if use not in declared:
            known = f"installed: {', '.join(declared)}" if declared else "none is installed"
            raise RecipeError(f"{use}: no entry point of that name in {group}", hint=f"{known}; a file is FILE.py:NAME")
        return
    try:
        source = decode_source(Path(file).read_bytes())
        table = symtable.symtable(source, file, "exec")
    except OSError:
        raise RecipeError(f"{file}: no such file", hint="a relative path starts from the recipe's directory") from None
    except (SyntaxError, ValueError) as error:
        raise RecipeError(f"{file}:{getattr(error, 'lineno', 1)}: not Python: {getattr(error, 'msg', error)}") from None
    names = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    if name not in names and not _STAR.search(source):
        raise RecipeError(f"{file}: defines no {name}", hint=f"it defines {', '.join(sorted(names)) or 'nothing'}")


def _check_writable(path: Path) -> None:
    """Check that a directory is there or can be made. Raises RecipeError."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise RecipeError(f"{there}: a file, where a directory is wanted", hint="name another directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecipeError(f"{there}: cannot be written", hint="name another directory")
