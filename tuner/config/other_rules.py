"""Rules by which values of other tools become ours: counts with units, shares, truth values, words, and their names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

from tuner.config.numbers import parse_number, write_number
from tuner.config.other_tools import by_name, foreign, of_value
from tuner.config.yaml import package_table

Lines = dict[str, Any]
"""What to write: our keys with their values."""
Given = Mapping[str, Any]
"""The other tool's keys, of which some change what another one means."""
P = ParamSpec("P")
Rule = Callable[[Any, Given], Lines | str | None]
"""Of a value and all that is given: lines, or a note in place of them, or None where the value is not understood."""

_DAY = 24 * 60 * 60
PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "device_batch_size",
              "batch_size_per_device", "local_batch_size")  # fmt: skip


def number(value: Any) -> Fraction | None:
    """The exact number that a value is, also where it is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return parse_number(value)
    except ValueError:
        return None


def first_number(given: Given, names: Iterable[str]) -> Fraction | None:
    """The first of these keys that has a number other than 0."""
    return next((found for name in names if (found := number(given.get(name)))), None)


def percent(share: Fraction) -> str:
    """A share as it is written: 0.03 is 3%."""
    return f"{write_number(share * 100)}%"


def listed(value: Any) -> list[str]:
    """The names in a list, or in a text between commas; none in anything else."""
    items = value.split(",") if isinstance(value, str) else value
    return [str(item).strip() for item in items] if isinstance(items, (list, tuple)) else []


def bound(rule: Callable[..., Lines | str | None], *arguments: Any) -> Rule:
    """A rule of a function that takes arguments of its own after the value and all that is given."""
    return lambda value, given: rule(value, given, *arguments)


def of_number(
    lines: Callable[Concatenate[Fraction, P], Lines | str | None]
) -> Callable[Concatenate[Any, P], Lines | str | None]:
    """What a number becomes; anything else is not understood."""
    def rule(value: Any, /, *given: P.args, **arguments: P.kwargs) -> Lines | str | None:
        return None if (found := number(value)) is None else lines(found, *given, **arguments)

    return rule


@of_number
def count(found: Fraction, given: Given, key: str, unit: str, off: str | None = None) -> Lines | str | None:
    """A count of `unit`; `off` is what 0 and less mean, nothing where it is None."""
    if found <= 0:
        return {key: off} if off is not None else f"{write_number(found)} means nothing for {key}; leave it out"
    if found < 1 and unit != "epochs":
        return {key: percent(found)}
    return {key: f"{write_number(found)} {unit if found != 1 else unit[:-1]}"}


@of_number
def per_epoch(times: Fraction, given: Given, key: str) -> Lines | str | None:
    """So many times an epoch."""
    every = round(float(1 / times), 4) if times > 0 else 0
    return {key: "never" if not every else "1 epoch" if every == 1 else f"{every:g} epochs"}


def strategy(value: Any, given: Given, key: str, cadence: str) -> Lines | str | None:
    """`no`, `epoch` or `steps`, of which the last one leaves the cadence to another key."""
    if value == "steps":
        steps = number(given.get(cadence))
        return {key: f"{write_number(steps)} steps"} if steps else f"{key} is itself the number of steps here"
    return {"no": {key: "never"}, "False": {key: "never"}, "epoch": {key: "1 epoch"}}.get(str(value))


def switch(value: Any, given: Given, key: str, on: Any, off: Any = None) -> Lines | str | None:
    """A truth value; `off` is what false means, the default where it is None."""
    word = str(value).lower()
    if word not in {"true", "false"}:
        return None
    chosen = on if word == "true" else off
    return f"false is the default of {key}; leave it out" if chosen is None else {key: chosen}


def packing(value: Any, given: Given) -> Lines | str | None:
    """Whether rows are packed, which either of LLaMA-Factory's two keys turns on."""
    is_on = any(str(given.get(name)).lower() == "true" for name in ("packing", "neat_packing"))
    return switch(is_on or value, given, "data.packing", "auto", False)


def words(
    value: Any, given: Given, key: str, known: Mapping[str, Any], notes: Mapping[str, str] = MappingProxyType({})
) -> Lines | str | None:
    """One of a few words, of which some have a note; those that are not here may be values that are not supported."""
    if not isinstance(value, (str, bool)):
        return None
    word = str(value).lower()
    if (text := by_name(notes).get(word)) is not None:
        return text
    found = by_name(known).get(word)
    if found is None:
        meant = of_value(key, value)
        return meant.replace("write ", f"write {key}: ", 1) if meant and meant.startswith("write ") else meant
    return found if isinstance(found, dict) else {key: found}


def schedule(value: Any, given: Given) -> Lines | str | None:
    """A schedule's name, of which a cosine with restarts is a plain cosine: transformers has one cycle by default."""
    if str(value).lower() == "warmup_stable_decay":  # whose decay is a cosine unless another one is named
        named = given.get("decay_type", (given.get("lr_scheduler_kwargs") or {}).get("decay_type"))
        return {"schedule.kind": "wsd"} | ({} if named else {"schedule.decay_shape": "cosine"})
    return words(value, given, "schedule.kind", package_table("other_data")["schedules"])


def all_unless(value: Any, given: Given, *names: str) -> Lines | str | None:
    """Every token is trained on unless one of these keys of the other tool says otherwise."""
    is_masked = any(str(given.get(name)).lower() == "true" for name in names)
    return {"method.train_on": "assistant" if is_masked else "all"}


def number_of(value: Any, given: Given, key: str, off: Any = None) -> Lines | str | None:
    """A number; `off` is what 0 and less mean."""
    found = number(value)
    if found is None:
        return {} if value == "auto" else {key: off} if value is None and off == "never" else None
    if found <= 0 and off is not None:
        return {key: off}
    exact = int(found) if found.denominator == 1 else float(found)
    return {key: exact if isinstance(value, str) else value}


def accumulated(value: Any, given: Given) -> Lines | str | None:
    """Rows of a step: those of a process times the micro-batches, times the processes where their number is given."""
    micro, steps = first_number(given, (*PER_DEVICE, "batch_size")), number(value)
    if first_number(given, ("train_batch_size", "train.global_batch_size")):
        return {}  # which is said already
    if steps is None or steps <= 0:
        return "accumulation follows from train.global_batch_size, the rows of a step"
    if micro is None:
        return (
            "accumulation follows from train.global_batch_size: N rows, which is micro_batch_size x "
            f"{write_number(steps)} x processes"
        )
    return {"train.global_batch_size": int(micro * steps * with_own_rows(given))}


def with_own_rows(given: Given) -> Fraction:
    """Processes that compute rows of their own: those of a tensor or sequence group share theirs."""
    found = number(given.get("processes")) or Fraction(1)
    for key in ("parallel.tensor", "parallel.sequence"):
        sizes = (number(given.get(name)) for name in foreign()[key])
        found /= next((size for size in sizes if size and size > 1), 1)
    return max(Fraction(1), found)


@of_number
def micro_batch(rows: Fraction, given: Given) -> Lines | str | None:
    """Rows of one process at once."""
    return {"train.micro_batch_size": int(rows)} if rows >= 1 and rows.denominator == 1 else None


@of_number
def betas(rate: Fraction, given: Given) -> Lines | str | None:
    """Both decay rates, of which another tool has a key each."""
    written = (number(given.get(f"adam_beta{index}", given.get(f"beta{index}"))) for index in (1, 2))
    pair = zip(written, (0.9, 0.999), strict=True)
    return {"optimizer.betas": [default if beta is None else float(beta) for beta, default in pair]}


@of_number
def min_lr(lowest: Fraction, given: Given) -> Lines | str | None:
    """The lowest learning rate, as a share of the peak."""
    peak = first_number(given, ("learning_rate", "lr"))
    if not peak:
        return "schedule.min_lr_ratio is the share of optimizer.lr that is left at the end, such as 10%"
    return {"schedule.min_lr_ratio": round(float(lowest / peak), 6)}


def scheduler_options(value: Any, given: Given) -> Lines | str | None:
    """The options of a scheduler of transformers."""
    if not isinstance(value, Mapping):
        return None
    if number(value.get("num_cycles")) == 1 and len(value) == 1:
        return {}  # one cycle is a cosine without restarts
    result: Lines = {}
    options = made(package_table("other_data")["scheduler_options"])
    for name, found in value.items():
        is_plain = number(found) == {"num_cycles": 1, "power": 1}.get(name)
        line = options[name](found, given) if name in options else {} if is_plain else None
        if not isinstance(line, dict):
            return (
                f"not supported: {name} of a scheduler; instead schedule.min_lr_ratio, or schedule.decay and "
                "schedule.decay_shape with schedule.kind: wsd"
            )
        result |= line
    return result


def bf16(value: Any, given: Given) -> Lines | str | None:
    """`bf16: false` is full precision where fp16 is not asked for either."""
    word = str(value).lower()
    if word in {"true", "full", "auto"}:
        return {"train.precision": "auto" if word == "auto" else "bf16"}
    if word == "false" and str(given.get("fp16", "false")).lower() != "true":
        return {"train.precision": "fp32"}
    return None


@of_number
def seconds(time: Fraction, given: Given) -> Lines | str | None:
    """A time in seconds; one of more than a day is as good as none."""
    if time <= 0:
        return None
    minutes = time / 60
    text = f"{write_number(minutes)} min" if minutes.denominator == 1 else f"{math.ceil(time)} s"
    return {} if time > _DAY else {"parallel.timeout": text}


KINDS: dict[str, Callable[..., Lines | str | None]] = {
    "all_unless": all_unless, "count": count, "number": number_of, "per_epoch": per_epoch,
    "strategy": strategy, "switch": switch, "words": words,
    "names": lambda value, given, key: {key: names} if (names := listed(value)) else None,
    "note": lambda value, given, text: text,
    "read_with": lambda value, given, *others: {},
    "same": lambda value, given, key: {key: value},
    "text": lambda value, given, key: {key: value} if isinstance(value, str) else None,
}  # fmt: skip
"""Rules with arguments of their own, by their names in other_rules.yaml and other_configs.yaml."""


def made(rows: Sequence[Mapping[str, Any]]) -> dict[str, Rule]:
    """The rules of a table, by the other tool's key."""
    rules: dict[str, Rule] = {}
    for row in rows:
        names = foreign()[row["of"]] if "of" in row else row["keys"].split()
        place, arguments = next((kind, given) for kind, given in row.items() if kind not in ("of", "keys"))
        rules |= dict.fromkeys(names, bound(KINDS.get(place) or _of_module(place), *arguments))
    return rules


def _of_module(place: str) -> Callable[..., Lines | str | None]:
    """A rule in a module next to this one: `other_keys.optimizer`."""
    module, _, name = place.partition(".")
    rule: Callable[..., Lines | str | None] = getattr(import_module(f"tuner.config.{module}"), name)
    return rule
