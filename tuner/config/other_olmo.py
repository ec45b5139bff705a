"""Meanings of the keys of an OLMo-core ladder that need code of their own: sizes, laws, and token arrays."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from tuner.config.numbers import write_number
from tuner.config.other_rules import Given, Lines, number, of_number, percent

_PEAK_LR = 0.00235
"""Peak learning rate of their ladder for 108M parameters, which lr_multiplier multiplies."""
_SIXTEEN_BITS = 2**16


def sizes(value: Any, given: Given) -> Lines | str | None:
    """A ladder starts at random weights and compares held-out losses."""
    return {"ladder.sizes": value, "model.init": "random", "data.eval": "1%"}


@of_number
def decay(share: Fraction) -> Lines:
    """The last part of a period."""
    return {"ladder.decay": percent(share)}


@of_number
def tokens(count: Fraction) -> Lines:
    """Tokens for each parameter."""
    return {"ladder.tokens": f"{write_number(count)} * N"}


@of_number
def peak_lr(factor: Fraction) -> Lines:
    """The rate of a size, by what multiplies theirs."""
    return {"ladder.lr": f"{float(factor) * _PEAK_LR:.6g} * (N / 108M)^(-1/3)"}


@of_number
def multiples(last: Fraction) -> Lines:
    """Their one multiple is the end of the last period: those before it end at half of what the next one does."""
    ends = [last]
    while ends[0] > 0.5:
        ends.insert(0, ends[0] / 2)
    return {"ladder.multiples": [float(end) for end in ends]}


def token_arrays(value: Any, given: Given) -> Lines | str | None:
    """Every file that a source names, however deep: flat arrays of the smallest type that holds the vocabulary."""
    wide = (number(given.get("tokenizer.vocab_size")) or 0) > _SIXTEEN_BITS
    found = [
        {"path": path, "dtype": str(dtype or ("uint32" if wide else "uint16"))} for path, dtype in _paths(value, None)
    ]
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
