"""A configuration of another tool, converted to a commented recipe, with everything that was not carried over.

Refused are files of no tool that is known, programs, and those that say nothing of a training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from tuner.config.advice import fits
from tuner.config.fields import fields
from tuner.config.load import RecipeText, load_recipe
from tuner.config.other_configs import Dialect, Tool, dataset_info, detect, dialects, read_given
from tuner.config.other_data import guessed, is_text, table, unread
from tuner.config.other_keys import TRAINERS, convert, known_names
from tuner.config.other_methods import PAIRS, PREFERENCES, kind_of, template_of
from tuner.config.other_rules import PER_DEVICE, first_number, number, with_own_rows
from tuner.config.other_tools import absent, of_value, theirs
from tuner.config.recipe import Recipe
from tuner.config.yaml import flow, one_line
from tuner.errors import RecipeError

_FIRST = ("max_steps", "max_steps_per_epoch", "warmup_steps", "num_warmup_steps", "save_strategy", "eval_strategy",
          "evaluation_strategy", "gradient_accumulation_steps")  # fmt: skip
"""Keys that win over others which become the same key of ours."""
_NEEDS_EVAL = ("eval.every", "eval.at_start", "eval.at_end", "eval.patience", "checkpoint.keep_best")
_AS_BY_DEFAULT = ("false is the default", "0 is the default")
"""How a sentence begins on a value that changes nothing."""
_ALWAYS_LISTED = {"group_by_length", "sort_by_length", "bucket_by_length", "train_sampling_strategy"}
"""Keys that need no counterpart and yet change the order of the rows."""
_OFF_MATTERS = {"train_on_eos", "train_on_eot"}
"""Keys whose false or none is a choice, too."""
_ITEM = "data.train."
_MOST_REPAIRS = 20


@dataclass(frozen=True)
class Imported:
    """The recipe as text that loads, whose configuration it was, and what of that is not in it."""

    tool: Tool
    text: str
    recipe: Recipe
    left: tuple[str, ...]
    """`key: value` with the reason, one each."""


@dataclass
class _Draft:
    """Our keys with their values and the keys that they come from, and what is left."""

    values: dict[str, Any]
    sources: dict[str, str]
    left: list[str]

    def put(self, lines: Mapping[str, Any], source: str) -> None:
        for key, value in lines.items():
            self.values[key], self.sources[key] = value, source

    def leave(self, key: str, value: Any, why: str) -> None:
        """Note a key that is not carried over; the default in its place is then not what its user chose."""
        self.left.append(f"{key}: {_shown(value)}: {why}")
        name = key.rpartition(".")[2].lower().replace("-", "_")
        stand_in = theirs().get(name, "")
        if self.sources.get(stand_in, "").endswith("default") and "eval" not in name:
            self.sources[stand_in] = f"in place of {key}: {_shown(value)}"

    def drop(self, why: str, *keys: str) -> None:
        """Leave out those of our keys that are there; what only a default says is no loss."""
        for key in keys:
            if key not in self.values:
                continue
            value, source = self.values.pop(key), self.sources.pop(key, key)
            if not source.endswith("default"):
                self.left.append(f"{source} ({key}: {flow(value)}): {why}")


def import_text(
    text: str, name: str, tool: Tool | None = None, processes: int | None = None, directory: Path = Path()
) -> Imported:
    """Convert the YAML or JSON text of a configuration, or a script with a training command, called `name` in messages.

    `processes` is on how many it ran, which its batch depends on; None is what a command says, or one. `directory` is
    where its own paths start from. Raises RecipeError where it cannot be read or is of no tool that is known.
    """
    refuse_program(text, name)
    given, named = read_given(text, name, processes, directory)
    if "data.train" in given and "model.name_or_path" in given:
        raise RecipeError(f"{name} is a recipe already", hint=f"check it: tuner config check {name}")
    keys = frozenset(part for key in given for part in (key, key.rpartition(".")[2]))
    found = tool or named or detect(keys)
    if found is None:
        raise RecipeError(f"{name}: of no tool that is known", hint=f"say which: --from {' | '.join(dialects())}")
    dialect = dialects()[found]
    require_known_method(given, f"{dialect.title}'s {name}")
    require_training(given, name, found, tool is not None or named is not None)
    own = str(given.get("dataset_dir") or "data")
    if found == "llama-factory":
        given["dataset_info"] = dataset_info(directory, own) or dataset_info(Path.cwd(), own)
    unlisted = guessed(given) if found == "llama-factory" else []
    left = [f"dataset: {item}: not in {own}/dataset_info.json, so its file is a guess" for item in unlisted]
    context = {key.rpartition(".")[2]: value for key, value in given.items()} | given
    method = kind_of(context)
    draft = _Draft({}, {}, left)
    draft.put(dialect.defaults_with(method, context), f"{dialect.title}'s default")
    if method is not None:
        draft.put({"method.kind": method}, f"its keys are of {method}")
    for key in sorted(given, key=lambda item: item.rpartition(".")[2] in _FIRST):
        _carry(key, given[key], context, dialect, draft)
    _settle(draft, context, found)
    recipe, written = _loaded(draft, f"{dialect.title}'s {name}")
    return Imported(found, written, recipe, tuple(dict.fromkeys(draft.left)))


def _carry(key: str, value: Any, given: Mapping[str, Any], dialect: Dialect, draft: _Draft) -> None:
    """Put what one key becomes into the draft, or note why it is left out."""
    name = key.rpartition(".")[2].lower().replace("-", "_")
    if key == "processes" or value is None or value in ("", [], {}):
        return
    rule = dialect.rules.get(key) or dialect.rules.get(name)
    if rule is None and {key, key.partition(".")[0]} & dialect.silent:
        return
    feature = None if rule else absent(name)
    if feature is not None:
        is_off = value in (False, 0, "none", "no") and name not in _OFF_MATTERS
        if not is_off and (feature.needed or name in _ALWAYS_LISTED):
            draft.leave(key, value, feature.sentence)
        return
    for inner, found in unread(value).items() if name in {"datasets", "test_datasets", "dataset"} else ():
        draft.leave(f"{key}.{inner}", found, "has no counterpart here")
    if rule is None and key in fields() and fits({key: value}) and not isinstance(value, bool):
        draft.put({key: value}, key)
        return
    converted = rule(value, given) if rule else convert(name, value, given)
    if converted is None and (own := [item for item in fields() if item.rpartition(".")[2] == name]) and len(own) == 1:
        converted = {own[0]: value}
    if isinstance(converted, str):
        if not converted.startswith(_AS_BY_DEFAULT) and " means nothing for " not in converted:
            draft.leave(key, value, converted.removesuffix("; leave it out"))
    elif converted is None and value is not False:
        draft.leave(key, value, "has no counterpart here")
    elif converted is not None and fits(converted):
        draft.put(converted, key)
    elif converted is not None and value is not False:
        draft.leave(key, value, f"not a value of {', '.join(converted)}")


def _settle(draft: _Draft, given: Mapping[str, Any], tool: Tool) -> None:
    """Make the parts fit together: batch, adapter, method, and what needs held-out rows."""
    values = draft.values
    micro = first_number(given, PER_DEVICE) or number(values.get("train.micro_batch_size"))
    steps = number(given.get("gradient_accumulation_steps"))
    processes = with_own_rows(given)
    if steps is None and micro and tool == "ms-swift":  # its default fills a batch of 16
        steps = Fraction(ceil(16 / (micro * processes)))
    steps = max(steps or Fraction(1), Fraction(1))
    if micro is not None:
        rows = int(micro * steps * processes)
        read = f"{micro} rows x {steps} accumulation x {processes} processes with rows of their own"
        draft.put({"train.global_batch_size": rows}, read)
        accumulated = "gradient_accumulation_steps"
        draft.left[:] = [item for item in draft.left if item.partition(":")[0].rpartition(".")[2] != accumulated]
    if any("lora" in str(given.get(name, "")).lower() for name in ("adapter", "finetuning_type")):
        values.setdefault("adapter.kind", "lora")
    if str(given.get("full_finetuning", "")).lower() == "true" or values.get("adapter.kind", "none") == "none":
        of_adapters = (key for key in values if key.startswith("adapter.") and key != "adapter.kind")
        draft.drop("there is no adapter", "model.quantize", *of_adapters)
    if tool == "ms-swift" and values.get("adapter.kind") == "none" and "learning_rate" not in given:
        draft.put({"optimizer.lr": 1e-5}, "ms-swift's default")
    if tool == "llama-factory" and "lora_alpha" not in given and "adapter.r" in values:
        draft.put({"adapter.alpha": 2 * values["adapter.r"]}, "LLaMA-Factory's default")
    _settle_method(draft, given, tool)
    _settle_items(draft)
    if values.get("data.too_long") == "truncate" and values.get("method.kind") == "pretrain":
        draft.drop("long texts are split", "data.too_long")
    if not values.get("data.eval"):
        draft.drop("there are no held-out rows; set data.eval", *_NEEDS_EVAL)
    if (schedule := values.get("schedule.kind", "cosine")) not in {"cosine", "linear", "wsd", "wsd_s"}:
        draft.drop(f"not with schedule.kind: {schedule}", "schedule.min_lr_ratio")
    if (optimizer := values.get("optimizer.kind", "adamw")) not in {"adamw", "muon"}:
        draft.drop(f"not with optimizer.kind: {optimizer}", "optimizer.betas", "optimizer.eps")
    needed = (("model.name_or_path", "OWNER/NAME", "model"), ("data.train", "rows.jsonl", "data set"))
    for key, stand_in, what in needed:
        if not values.get(key):
            why = f"the file names no {what}; put yours here"
            draft.put({key: stand_in}, why)
            draft.left.append(f"{key}: {why}")


def _settle_items(draft: _Draft) -> None:
    """Keys that belong to an item of `data.train`, written into each of them."""
    inner = {key: value for key, value in draft.values.items() if key.startswith(_ITEM)}
    sources = draft.values.get("data.train") or []
    listed = sources if isinstance(sources, list) else [sources]
    items = [source if isinstance(source, Mapping) else {"path": source} for source in listed]
    for key, value in inner.items():
        source, name = draft.sources.pop(key), key.removeprefix(_ITEM)
        del draft.values[key]
        if name == "path" or not items or not fits({f"{_ITEM}0.{name}": value}):
            draft.leave(source, value, f"not what {name} of an item of data.train takes")
            continue
        items = [{**item, name: value} for item in items]
        draft.put({"data.train": items}, f"{draft.sources['data.train']}, {source}")


def _settle_method(draft: _Draft, given: Mapping[str, Any], tool: Tool) -> None:
    """The method that the form of the records asks for, and which of their tokens are trained on."""
    values = draft.values
    if is_text(values.get("data.train")) and values.get("method.kind") != "distill":
        draft.put({"method.kind": "pretrain"}, "records of plain text")
    method = values.get("method.kind")
    if method == "pretrain":
        draft.drop("every token of plain text is learned", "method.train_on")
        if tool == "llama-factory" and "packing" not in given:
            draft.put({"data.packing": "auto"}, "LLaMA-Factory's default of stage pt")
    if method in PREFERENCES:
        _settle_preferences(draft, given, str(method))
    if tool == "trl" and draft.sources.get("method.train_on") == "TRL's default":
        draft.sources["method.train_on"] += "; records of a prompt and a completion: method.train_on: assistant"


def _settle_preferences(draft: _Draft, given: Mapping[str, Any], method: str) -> None:
    """Answers are what is trained; a row holds both of a pair, where others' lengths are of one."""
    values = draft.values
    draft.drop(f"{method} learns from the answers", "method.train_on")
    length = number(values.get("data.max_length"))
    if method in PAIRS and length is not None:
        source = draft.sources["data.max_length"]
        draft.put({"data.max_length": int(2 * length)}, f"2 x {source}: a row holds both answers of a pair")
    if values.get("data.too_long") == "split":
        draft.drop("a pair is not split", "data.too_long")
    template = template_of(given.get("datasets"))
    if template is not None and "tokenizer.chat_template" not in values:
        draft.put({"tokenizer.chat_template": template}, "the type of its data sets, which write it themselves")


def _loaded(draft: _Draft, origin: str) -> tuple[Recipe, str]:
    """Write the recipe and load it; a value that it does not take is left out, with what is wrong with it."""
    for _ in range(_MOST_REPAIRS):
        text = _written(draft, origin)
        try:
            return load_recipe(RecipeText(text, "import")).recipe, text
        except RecipeError as error:
            wrong = [_owner(problem.key, draft) for problem in error.problems]
            if not any(wrong):
                raise
            for key, problem in zip(wrong, error.problems, strict=True):
                draft.drop(problem.message, key)
    raise RecipeError(f"{origin}: no recipe comes of it")


def _owner(key: str, draft: _Draft) -> str:
    """The key of the draft that a problem's key belongs to; required ones are never left out."""
    found = next((own for own in draft.values if key == own or key.startswith(f"{own}.")), "")
    return "" if found in {"model.name_or_path", "data.train", "method.kind"} else found


def _written(draft: _Draft, origin: str) -> str:
    """The recipe, each line with the key that it comes from, after what was not carried over."""
    lines = [f"# From {origin}, by tuner import."]
    if draft.left:
        lines += ["# Not carried over:", *(f"#   {one_line(item)}" for item in dict.fromkeys(draft.left))]
    rows: list[tuple[str, str]] = []
    places = list(dict.fromkeys(key.rpartition(".")[0] for key in fields()))
    known = list(fields())
    order = sorted(
        draft.values,
        key=lambda key: (places.index(key.rpartition(".")[0]), known.index(key) if key in fields() else len(known)),
    )
    section = ""
    for key in order:
        owner, _, name = key.rpartition(".")
        if owner != section and owner:
            rows.append((f"{owner}:", ""))
        section = owner
        value, indent = draft.values[key], "  " if owner else ""
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            rows.append((f"{indent}{name}:", draft.sources[key]))
            rows += [(f"{indent}  - {flow(item)}", "") for item in value]
        else:
            rows.append((f"{indent}{name}: {flow(value)}", draft.sources[key]))
    width = min(56, max(len(text) for text, _ in rows))
    lines += [f"{text.ljust(width)}  # {one_line(source)}" if source else text for text, source in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    text = flow(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_READ = (
    "files of axolotl, LLaMA-Factory, TRL, torchtune, ms-swift, Unsloth, ArcticTraining, XTuner V1 and RecIS, of "
    "OLMo-core's ladders, and shell scripts with their commands"
)
_METHOD_KEYS = ("rl", "stage", "rlhf_type", "task_type", "training_type", "trainer_type", "training.trainer_type")


def require_training(given: Mapping[str, Any], name: str, tool: Tool, is_said: bool) -> None:
    """Raise RecipeError for a file that a recipe would be made up for: not the tool's own, or of no training."""
    title = dialects()[tool].title
    tops = {key.partition(".")[0] for key in given} - {"processes", "dataset_info"}
    unknown = sorted(top for top in tops if not _is_known(top, given, tool))
    sections = [top for top in unknown if top not in given or isinstance(given[top], Mapping)]
    if tool != "torchtune" and not is_said and (len(sections) > 1 or len(unknown) * 2 > len(tops)):
        shown = ", ".join(unknown[:4])
        raise RecipeError(
            f"{name}: of no tool that is known: {shown} are no keys of {title}'s, whose others are like them",
            hint=f"read are {_READ}; if it is {title}'s all the same: --from {tool}",
        )
    last = {key.rpartition(".")[2] for key in given} | tops
    data, trains, runs = ({*names.split()} for names in table("keys").values())
    if not last & (data | trains) and last & runs:
        raise RecipeError(
            f"{name}: trains nothing: it has no data set, no learning rate and no number of steps or epochs",
            hint=f"read are {_READ}, each of a training",
        )
    if tool == "arctictraining" and given.get("type", "sft") not in TRAINERS:
        raise RecipeError(
            f"{name}: type: {given['type']}: a trainer of its own, whose code says what is trained",
            hint="write a recipe; a loss of your own is method.kind: custom with method.use: FILE.py:NAME",
        )
    if tool == "llama-factory" and not last & data and "do_train" not in last and "stage" not in last:
        raise RecipeError(f"{name}: names no data set, so it trains nothing")


def _is_known(top: str, given: Mapping[str, Any], tool: Tool) -> bool:
    """Whether a key at the top of a file may be one of the tool's, which has sections of its own or none."""
    if top not in given:
        return top in table("file_sections").get(tool, "").split()
    name, dialect = top.lower().replace("-", "_"), dialects()[tool]
    return name in known_names() or top in fields() or name in dialect.marks | dialect.rules.keys() | dialect.silent


def require_known_method(given: Mapping[str, Any], origin: str) -> None:
    """Raise RecipeError for a training of a kind that is not here: a recipe of it would be of something else."""
    for key in _METHOD_KEYS:
        word = str(given.get(key)).lower().removeprefix("trl_").removeprefix("verl_")
        if kind_of({key: given.get(key), "loss_type": given.get("loss_type")}) is not None:
            continue
        meant = of_value("method.kind", word)
        if meant is not None and meant.startswith("not supported"):
            raise RecipeError(f"{origin}: {key}: {given[key]}: {meant}")
    if any(name in given for name in ("reward_funcs", "num_generations")):
        raise RecipeError(f"{origin}: {of_value('method.kind', 'grpo')}")
    for key, value in given.items():
        if key.endswith("_component_") and ".rlhf." in str(value) and kind_of(given) is None:
            meant = of_value("method.kind", "ppo" if "PPO" in str(value) else "wpo")
            raise RecipeError(f"{origin}: {key}: {value}: {meant}")


def refuse_program(text: str, name: str) -> None:
    """Raise RecipeError for a Python program, which is never run, and of which nothing is read."""
    is_program = name.endswith((".py", ".ipynb")) or any(
        line.startswith(("import ", "from ")) and " import " in f" {line}" for line in text.splitlines()[:50]
    )
    if is_program:
        raise RecipeError(
            f"{name}: a Python program, which is not run here",
            hint="write the arguments of its trainer as YAML (learning_rate: 2e-5, dataset_name: OWNER/NAME, ...) and "
            "import that: tuner import args.yaml --from trl; read are also shell scripts with a training command",
        )
