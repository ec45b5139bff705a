"""Meanings of ArcticTraining's keys that need code of their own: its lists of sources and checkpoint engines, PEFT."""

from collections.abc import Mapping
from typing import Any

from tuner.config.other_data import located, table
from tuner.config.other_keys import deepspeed
from tuner.config.other_memory import adapter
from tuner.config.other_rules import Given, Lines, number, percent
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
