"""Meanings of XTuner V1's keys that need code of their own: its data sets, model, optimizer and rates."""

from collections.abc import Mapping
from typing import Any

from tuner.config.other_data import located
from tuner.config.other_rules import Given, Lines, Rule, number, percent


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


def optimizer(value: Any, given: Given) -> Lines | str | None:
    """Where the state of AdamW is kept."""
    return {"optimizer.kind": "adamw", "optimizer.offload": "host"} if value is True else {}


def lowest_rate(value: Any, given: Given) -> Lines | str | None:
    """An absolute rate, as a share of the peak."""
    lowest, peak = number(value), number(given.get("optim_cfg.lr", given.get("lr")))
    if lowest is None or not peak or given.get("lr_type", "constant") == "constant":
        return {}
    return {"schedule.min_lr_ratio": round(float(lowest / peak), 6)}


def warmup(value: Any, given: Given) -> Lines | str | None:
    """A share of the run, or steps from 1 on."""
    share = number(value)
    if share is None:
        return None
    return {"schedule.warmup": "never" if not share else percent(share) if share < 1 else f"{int(share)} steps"}


def recomputed(value: Any, given: Given) -> Lines | str | None:
    """The share of decoder layers that is computed again."""
    share = number(value)
    if share is None:
        return None
    level = {"train.gradient_checkpointing": "full" if share else "none"}
    return level | ({"train.gradient_checkpointing_layers": percent(share)} if 0 < share < 1 else {})


def packed(value: Any, given: Given) -> Lines | str | None:
    """Whether documents share rows; there is no cutting of all into rows of one length here."""
    if value == "hard":
        return "documents are packed whole here; only those longer than a row are cut"
    return {"data.packing": value != "none"}


def kept(key: str) -> Rule:
    """A number of what is kept; theirs keeps all at -1."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        count = number(value)
        return None if count is None else {key: int(count) if count > 0 else 1000}

    return rule


def interval(key: str) -> Rule:
    """Steps between two; none at -1, where the end alone counts."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        count = number(value)
        return None if count is None else {key: f"{int(count)} steps" if count > 0 else "never"}

    return rule


RULES: dict[str, Rule] = {
    "dataset_cfg": data_sets,
    "dataset_config_list": data_sets,
    "swap_optimizer": optimizer,
    "lr_min": lowest_rate,
    "lr_cfg.warmup_ratio": warmup,
    "recompute_ratio": recomputed,
    "pack_level": packed,
    "checkpoint_interval": interval("checkpoint.every"),
    "checkpoint_maxkeep": kept("checkpoint.keep"),
    "hf_max_keep": kept("export.keep"),
}
"""How keys of an XTuner V1 configuration become ours; the others are in other_configs.yaml."""
