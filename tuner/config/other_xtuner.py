"""Meanings of XTuner V1's keys that need code of their own: its data sets, model, optimizer and rates."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tuner.config.other_data import located
from tuner.config.other_rules import Given, Lines, min_lr, number, of_number, percent


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
def recomputed(share: Fraction) -> Lines:
    """The share of decoder layers that is computed again."""
    level = {"train.gradient_checkpointing": "full" if share else "none"}
    return level | ({"train.gradient_checkpointing_layers": percent(share)} if 0 < share < 1 else {})
