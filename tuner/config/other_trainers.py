"""Meanings of keys that need code of their own: of ArcticTraining, XTuner V1, OLMo-core's ladders and RecIS."""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import count
from typing import Any

from tuner.config.numbers import write_number
from tuner.config.other_data import located, table
from tuner.config.other_keys import adapter, deepspeed
from tuner.config.other_rules import Given, Lines, min_lr, number, of_number, percent
from tuner.config.recipe import PEFT_TYPES

_SAVES, _EXPORTS = "checkpoint", "export"


def sources(value: Any, given: Given, key: str, split: int) -> Lines | str | None:
    """Their list of data sets, each a name or a mapping."""
    found = [_source(item, split) for item in (value if isinstance(value, list) else [value])]
    return {key: found} if all(found) else None


def _source(item: Any, split: int) -> Any:
    said = item if isinstance(item, Mapping) else {"name_or_path": item}
    name = said.get("name_or_path")
    if not isinstance(name, str):
        return None
    of_class = table("splits").get(name, ("train", "test"))[split]
    source: dict[str, Any] = {"path": located(name, said.get("split") or of_class)}
    if (share := number(said.get("sample_ratio"))) is not None:
        source["weight"] = min(float(share), 1.0)  # above 1 they take every document once
    if (count := number(said.get("sample_count"))) is not None:
        source["count"] = int(count)
    if (seed := number(said.get("sample_seed"))) is not None and ("count" in source or source.get("weight", 1) % 1):
        source["seed"] = int(seed)
    if said.get("process") is False:
        source["format"] = "tokens"
    return source if len(source) > 1 else source["path"]


def split_off(value: Any, given: Given) -> Lines | str | None:
    """`[0.9, 0.1]`: the share of the rows that is held out."""
    share = number(value[1]) if isinstance(value, list) and len(value) == 2 else None  # noqa: PLR2004 - two shares
    if share is None:
        return None
    return {"data.eval": percent(share)} if share else "0 is the default of data.eval; leave it out"


def engines(value: Any, given: Given) -> Lines | str | None:
    """Their list of checkpoint engines: `huggingface` writes what is an export here, others what resumes."""
    lines: Lines = {}
    for engine in value if isinstance(value, list) else [value]:
        if not isinstance(engine, Mapping):
            return None
        if engine.get("enabled") is False:
            continue
        section = _EXPORTS if engine.get("type") == "huggingface" else _SAVES
        for name, unit in (("save_every_n_steps", "steps"), ("save_every_n_epochs", "epochs")):
            if count := number(engine.get(name)):
                lines[f"{section}.every"] = f"{int(count)} {unit if count != 1 else unit[:-1]}"
        if engine.get("save_end_of_training") is True:
            lines[f"{section}.at_end"] = True
    return lines


def peft(value: Any, given: Given) -> Lines | str | None:
    """PEFT's config: of LoRA by keys of our own as far as there are any, of others as it stands."""
    if not isinstance(value, Mapping):
        return None
    kind = str(value.get("peft_type", "LORA")).upper()
    if kind not in PEFT_TYPES:
        return f"not supported: adapters of PEFT that do not change linear layers ({kind}); instead adapter.kind: lora"
    names = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules",
             "use_rslora": "use_rslora", "modules_to_save": "modules_to_save"}  # fmt: skip
    if kind != "LORA" or value.keys() - {*names, "peft_type", "use_dora", "task_type"}:
        return {"adapter.kind": "peft", "adapter.config": {**value, "peft_type": kind}}
    found = adapter("dora" if value.get("use_dora") is True else "lora") or {}
    return found | {f"adapter.{ours}": value[theirs] for theirs, ours in names.items() if value.get(theirs)}


def model_type(value: Any, given: Given) -> Lines | str | None:
    """Their model factories."""
    if value == "liger":
        return {"model.kernels": "liger"}
    return "a model of its own class: model.name_or_path takes those of transformers" if value != "hf" else {}


def sharded(value: Any, given: Given) -> Lines | str | None:
    """DeepSpeed by its stage, and whether the optimizer's state is on the host."""
    section = value.get("zero_optimization") if isinstance(value, Mapping) else None
    if not isinstance(section, Mapping):
        return deepspeed(value, given)
    found = deepspeed({"zero_optimization": {"stage": section.get("stage")}}, given)
    host = section.get("offload_optimizer")
    if isinstance(found, dict) and isinstance(host, Mapping) and host.get("device") == "cpu":
        found |= {"optimizer.kind": "adamw", "optimizer.offload": "host"}
    return found


def profiled(value: Any, given: Given) -> Lines | str | None:
    """Their memory profiler: `step` is `e2e` begun at the first batch."""
    if value not in ("e2e", "step"):
        return {} if value is None else None
    entries = number(given.get("mem_profiler_max_entries"))
    return {"profile.memory": "all"} | ({} if entries is None else {"profile.entries": int(entries)})


def data_sets(value: Any, given: Given) -> Lines | str | None:
    """A list of ``{dataset: {anno_path, sample_ratio}, tokenize_fn: {...}}``, or of the data sets alone."""
    found = []
    for item in value if isinstance(value, list) else [value]:
        said = item.get("dataset", item) if isinstance(item, Mapping) else {}
        path = said.get("anno_path")
        if not isinstance(path, str):
            return None
        source: dict[str, Any] = {"path": path if "/" in path or "." in path else located(path)}
        share = number(said.get("sample_ratio"))
        if share is not None and share != 1:
            source["weight"] = float(share)
        found.append(source if len(source) > 1 else source["path"])
    return {"data.train": found}


def lowest_rate(value: Any, given: Given) -> Lines | str | None:
    """An absolute rate, as a share of the peak."""
    found = min_lr(value, {**given, "lr": given.get("optim_cfg.lr", given.get("lr"))})
    return {} if given.get("lr_type", "constant") == "constant" or not isinstance(found, dict) else found


@of_number
def recomputed(share: Fraction, given: Given) -> Lines:
    """The share of decoder layers that is computed again."""
    level = {"train.gradient_checkpointing": "full" if share else "none"}
    return level | ({"train.gradient_checkpointing_layers": percent(share)} if 0 < share < 1 else {})


_PEAK_LR = 0.00235
"""Peak learning rate of their ladder for 108M parameters, which lr_multiplier multiplies."""


def sizes(value: Any, given: Given) -> Lines | str | None:
    """A ladder starts at random weights and compares held-out losses."""
    return {"ladder.sizes": value, "model.init": "random", "data.eval": "1%"}


decay = of_number(lambda share, given: {"ladder.decay": percent(share)})
"""The last part of a period."""
tokens = of_number(lambda each, given: {"ladder.tokens": f"{write_number(each)} * N"})
"""Tokens for each parameter."""
peak_lr = of_number(lambda factor, given: {"ladder.lr": f"{float(factor) * _PEAK_LR:.6g} * (N / 108M)^(-1/3)"})
"""The rate of a size, by what multiplies theirs."""


@of_number
def multiples(last: Fraction, given: Given) -> Lines:
    """Their one multiple is the end of the last period: those before it end at half of what the next one does."""
    ends = [last]
    while ends[0] > 0.5:
        ends.insert(0, ends[0] / 2)
    return {"ladder.multiples": [float(end) for end in ends]}


def token_arrays(value: Any, given: Given) -> Lines | str | None:
    """Every file that a source names, however deep: flat arrays of the smallest type that holds the vocabulary."""
    smallest = "uint32" if (number(given.get("tokenizer.vocab_size")) or 0) > 2**16 else "uint16"
    found = [{"path": path, "dtype": str(dtype or smallest)} for path, dtype in _paths(value, None)]
    return {"data.train": found, "method.kind": "pretrain", "data.rows": "cut"} if found else None


def _paths(value: Any, dtype: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        dtype = value.get("dtype") or dtype
        for key, child in value.items():
            named = [child] if isinstance(child, str) else child
            if key in {"paths", "source_paths"} and isinstance(named, list):
                yield from ((str(path), dtype) for path in named)
            else:
                yield from _paths(child, dtype)
    elif isinstance(value, list):
        for child in value:
            yield from _paths(child, dtype)


_NO_WEIGHTS = ("", "*", "io_state", "global_step", "train_io", "eval_io", "recis.dense.optim")
"""Globs of no weights, or of all."""


def bank(value: Any, given: Given) -> Lines | str | None:
    """A list of ``{path, load, exclude, oname, is_dynamic, ignore_error, skip}``; later ones win there, too."""
    cadences = ((number(given.get(f"load_update_{unit}")), unit) for unit in ("steps", "windows", "epochs"))
    every, found = [f"{often} {unit}" for often, unit in cadences if often], []
    for item in value if isinstance(value, list) else ():
        said = item if isinstance(item, Mapping) else {"path": item}
        names = said.get("oname") or {}
        pairs = [pair for each in (names if isinstance(names, list) else [names]) for pair in each.items()]
        entry = {"path": said.get("path"), "rename": {there: _numbered(here) for here, there in pairs}}
        entry |= {key: [name for name in said.get(key) or () if name not in _NO_WEIGHTS] for key in ("load", "exclude")}
        entry |= {"every": every if said.get("is_dynamic") is True else []}
        entry |= {"strict": False} if said.get("ignore_error") is True else {}
        if said.get("skip") is not True:
            found.append({key: part for key, part in entry.items() if part not in ([], {})})
    return {"model.init_from": found}


def _numbered(name: str) -> str:
    """A name here, by what the wildcards of the one there stand for in their order."""
    numbers = count(1)
    return re.sub(r"\*", lambda found: f"{{{next(numbers)}}}", name)


def duration(value: Any, given: Given) -> Lines | str | None:
    """Steps are those of each epoch."""
    steps, epochs = number(given.get("train_steps")), number(given.get("train_epoch", 1))
    return {"train.duration": f"{value} epochs" if not steps or not epochs else f"{steps * epochs} steps"}


def windows(value: Any, given: Given) -> Lines | str | None:
    """Numbers of windows, which are files here until the recipe says otherwise."""
    own = {"per_launch": given.get("window_iter"), "save_every": given.get("save_every_n_windows")}
    counted = {key: found for key, found in own.items() if found}
    return {"data.windows": {"files": 1, "passes": "stream", **counted}, "schedule.kind": "constant"}
