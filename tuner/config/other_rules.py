"""Rules by which values of other tools become ours: counts with units, shares, truth values, words, and their names."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tuner.config.numbers import parse_number, write_number
from tuner.config.other_tools import by_name, foreign, of_value

Lines = dict[str, Any]
"""What to write: our keys with their values."""
Given = Mapping[str, Any]
"""The other tool's keys, of which some change what another one means."""
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


def percent(share: Fraction) -> str:
    """A share as it is written: 0.03 is 3%."""
    return f"{write_number(share * 100)}%"


def count_of(key: str, unit: str, off: str | None = None) -> Rule:
    """A count of `unit`; `off` is what 0 and less mean, nothing where it is None."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        count = number(value)
        if count is None:
            return None
        if count <= 0:
            return {key: off} if off is not None else f"{write_number(count)} means nothing for {key}; leave it out"
        if 0 < count < 1 and unit != "epochs":
            return {key: percent(count)}
        return {key: f"{write_number(count)} {unit if count != 1 else unit[:-1]}"}

    return rule


def share_of(key: str, off: str | None) -> Rule:
    """A ratio, which is written as percent; a count of `steps` where it is above 1."""
    steps = count_of(key, "steps", off)

    def rule(value: Any, given: Given) -> Lines | str | None:
        share = number(value)
        return {key: percent(share)} if share is not None and 0 < share < 1 else steps(value, given)

    return rule


def per_epoch(key: str) -> Rule:
    """So many times an epoch."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        times = number(value)
        if times is None:
            return None
        if times <= 0:
            return {key: "never"}
        every = round(float(1 / times), 4)
        return {key: "1 epoch" if every == 1 else f"{every:g} epochs"}

    return rule


def strategy(key: str, count: str) -> Rule:
    """`no`, `epoch` or `steps`, of which the last one leaves the cadence to another key."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        word = "no" if value is False else value
        if word == "steps":
            steps = number(given.get(count))
            return {key: f"{write_number(steps)} steps"} if steps else f"{key} is itself the number of steps here"
        return {"no": {key: "never"}, "epoch": {key: "1 epoch"}}.get(str(word))

    return rule


def switch(key: str, on: Any, off: Any = None) -> Rule:
    """A truth value; `off` is what false means, the default where it is None."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        if isinstance(value, str) and value.lower() in {"true", "false"}:
            value = value.lower() == "true"
        if not isinstance(value, bool):
            return None
        chosen = on if value else off
        return f"false is the default of {key}; leave it out" if chosen is None else {key: chosen}

    return rule


def packing(value: Any, given: Given) -> Lines | str | None:
    """Whether rows are packed, which either of LLaMA-Factory's two keys turns on."""
    is_on = any(str(given.get(name)).lower() == "true" for name in ("packing", "neat_packing"))
    return switch("data.packing", "auto", False)(is_on or value, given)


def words(key: str, words: Mapping[str, Any]) -> Rule:
    """One of a few words; those that are not here may be values that are not supported."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        if not isinstance(value, (str, bool)):
            return None
        found = words.get(str(value).lower())
        if found is None:
            meant = of_value(key, value)
            return meant.replace("write ", f"write {key}: ", 1) if meant and meant.startswith("write ") else meant
        return found if isinstance(found, dict) else {key: found}

    return rule


def cycles(rule: Rule) -> Rule:
    """A schedule's name, of which a cosine with restarts is a plain cosine: transformers has one cycle by default."""

    def restarts(value: Any, given: Given) -> Lines | str | None:
        if str(value).lower() == "warmup_stable_decay":  # whose decay is a cosine unless another one is named
            named = given.get("decay_type", (given.get("lr_scheduler_kwargs") or {}).get("decay_type"))
            return {"schedule.kind": "wsd"} | ({} if named else {"schedule.decay_shape": "cosine"})
        return {"schedule.kind": "cosine"} if str(value).lower() == "cosine_with_restarts" else rule(value, given)

    return restarts


def all_unless(*names: str) -> Rule:
    """Every token is trained on unless one of these keys of the other tool says otherwise."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        is_masked = any(str(given.get(name)).lower() == "true" for name in names)
        return {"method.train_on": "assistant" if is_masked else "all"}

    return rule


def note(text: str) -> Rule:
    """A sentence in place of a line."""
    return lambda value, given: text


def number_of(key: str, off: Any = None) -> Rule:
    """A number; `off` is what 0 and less mean."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        found = number(value)
        if found is None:
            return {} if value == "auto" else {key: off} if value is None and off == "never" else None
        if found <= 0 and off is not None:
            return {key: off}
        return {key: value if not isinstance(value, str) else _plain(found)}

    return rule


def _plain(count: Fraction) -> int | float:
    return int(count) if count.denominator == 1 else float(count)


def accumulated(value: Any, given: Given) -> Lines | str | None:
    """Rows of a step: those of a process times the micro-batches, times the processes where their number is given."""
    micro = next((found for name in (*PER_DEVICE, "batch_size") if (found := number(given.get(name)))), None)
    steps, processes = number(value), with_own_rows(given)
    if any(number(given.get(name)) for name in ("train_batch_size", "train.global_batch_size")):
        return {}  # which is said already
    if steps is None or steps <= 0:
        return "accumulation follows from train.global_batch_size, the rows of a step"
    if micro is None:
        return (
            "accumulation follows from train.global_batch_size: N rows, which is micro_batch_size x "
            f"{write_number(steps)} x processes"
        )
    return {"train.global_batch_size": int(micro * steps * processes)}


def with_own_rows(given: Given) -> Fraction:
    """Processes that compute rows of their own: those of a tensor or sequence group share theirs."""
    found = number(given.get("processes")) or Fraction(1)
    for key in ("parallel.tensor", "parallel.sequence"):
        sizes = (number(given.get(name)) for name in foreign()[key])
        found /= next((size for size in sizes if size and size > 1), 1)
    return max(Fraction(1), found)


def micro_batch(value: Any, given: Given) -> Lines | str | None:
    """Rows of one process at once."""
    rows = number(value)
    return {"train.micro_batch_size": int(rows)} if rows is not None and rows >= 1 and rows.denominator == 1 else None


def betas(value: Any, given: Given) -> Lines | str | None:
    """Both decay rates, of which another tool has a key each."""
    pair = [number(given.get(f"adam_beta{index}", given.get(f"beta{index}"))) for index in (1, 2)]
    if number(value) is None:
        return None
    defaults = (Fraction("0.9"), Fraction("0.999"))
    return {
        "optimizer.betas": [
            float(default if beta is None else beta) for beta, default in zip(pair, defaults, strict=True)
        ]
    }


def min_lr(value: Any, given: Given) -> Lines | str | None:
    """The lowest learning rate, as a share of the peak."""
    lowest, peak = (
        number(value),
        next((found for name in ("learning_rate", "lr") if (found := number(given.get(name)))), None),
    )
    if lowest is None:
        return None
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
    for name, found in value.items():
        line: Lines | str | None = None
        if name in {"min_lr_rate", "min_lr_ratio"}:
            line = number_of("schedule.min_lr_ratio")(found, given)
        elif name in {"min_lr", "lr_end"}:
            line = min_lr(found, given)
        elif name == "num_decay_steps":
            line = count_of("schedule.decay", "steps")(found, given)
        elif name == "decay_type":
            shapes = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
            line = words("schedule.decay_shape", shapes)(found, given)
        elif number(found) == {"num_cycles": 1, "power": 1}.get(name):
            line = {}
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


def dtype(value: Any, given: Given) -> Lines | str | None:
    """A type of torch, which decides the computation here."""
    word = str(value).lower().removeprefix("torch.")
    found = {
        "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32", "auto": "auto",
        "float16": "fp16", "fp16": "fp16", "half": "fp16",
    }.get(word)  # fmt: skip
    return None if found is None else {"train.precision": found}


def seconds(value: Any, given: Given) -> Lines | str | None:
    """A time in seconds."""
    seconds = number(value)
    if seconds is None or seconds <= 0:
        return None
    if seconds > _DAY:
        return {}  # as good as none
    minutes = seconds / 60
    return {
        "parallel.timeout": f"{write_number(minutes)} min" if minutes.denominator == 1 else f"{math.ceil(seconds)} s"
    }


def names_in(key: str) -> Rule:
    """Names in a list or separated by commas."""

    def rule(value: Any, given: Given) -> Lines | str | None:
        items = value.split(",") if isinstance(value, str) else value
        return {key: [str(item).strip() for item in items]} if isinstance(items, list) and items else None

    return rule


def text_of(key: str) -> Rule:
    """A text that stays as it is."""
    return lambda value, given: {key: value} if isinstance(value, str) else None


def same(key: str) -> Rule:
    """Any value, as it is."""
    return lambda value, given: {key: value}


MAKERS: dict[str, Callable[..., Rule]] = {
    "all_unless": all_unless, "count": count_of, "names": names_in, "note": note, "number": number_of,
    "per_epoch": per_epoch, "same": same, "share": share_of, "strategy": strategy, "switch": switch, "text": text_of,
    "words": words,
}  # fmt: skip
"""What makes a rule of its arguments, by its name in other_rules.yaml and other_configs.yaml."""


def made(rows: Sequence[Mapping[str, Any]]) -> dict[str, Rule]:
    """The rules of a table, by the other tool's key."""
    rules: dict[str, Rule] = {}
    for row in rows:
        names = foreign()[row["of"]] if "of" in row else row["keys"].split()
        rule = next(MAKERS[kind](*arguments) for kind, arguments in row.items() if kind in MAKERS)
        rules |= dict.fromkeys(names, rule)
    return rules


_SCHEDULES: dict[str, Any] = {
    "cosine": "cosine", "linear": "linear", "inverse_sqrt": "inverse_sqrt", "constant_with_warmup": "constant",
    "constant": {"schedule.kind": "constant", "schedule.warmup": "never"}, "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine", "polynomial": "linear", "wsd": "wsd",
}  # fmt: skip
RULES: dict[str, Rule] = by_name({
    "gradient_accumulation_steps": accumulated,
    "bf16 amp": bf16,
    "dtype torch_dtype model_dtype weights_dtype": dtype,
    "adam_beta1 adam_beta2 beta1 beta2": betas,
    "lr_scheduler_type lr_scheduler scheduler": cycles(words("schedule.kind", _SCHEDULES)),
    "min_lr lr_end eta_min": min_lr,
    "lr_scheduler_kwargs scheduler_kwargs lr_scheduler_config": scheduler_options,
    "packing neat_packing": packing,
    "ddp_timeout dist_timeout nccl_timeout timeout_seconds": seconds,
})
"""Such rules by the keys that have them."""
