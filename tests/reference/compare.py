"""Documents against their reference, row by row."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.product import Encoded, Prepared


@dataclass(frozen=True)
class Verdict:
    """What became of one file: refused rows by reason and the differing rows, each in words."""

    file: str
    rows: int
    refused: Counter[str]
    differing: list[str]

    def line(self) -> str:
        """One line of the table."""
        reasons = "; ".join(f"{count} {reason}" for reason, count in self.refused.most_common(3))
        return f"{self.file:42} {self.rows:6} {self.refused.total():8} {len(self.differing):10}  {reasons}".rstrip()


HEADER = f"{'file':42} {'rows':>6} {'refused':>8} {'differing':>10}"


def judge(expected: dict[str, list[Encoded]], prepared: Prepared, tokenizer: Any) -> list[Verdict]:
    """Compare a run over files, in order, with the reference of every row; rows with no target to train are dropped."""
    rejected: dict[str, dict[int, str]] = {name: {} for name in expected}
    for reject in prepared.rejects:
        rejected[Path(reject["file"]).name][reject["line"]] = reject["reason"]
    documents = iter(prepared.documents)
    verdicts = []
    for name, references in expected.items():
        differing = []
        for line, reference in enumerate(references, 1):
            if line in rejected[name] or not reference.trained[1:].any():
                continue
            document = next(documents, None)
            if document is None or not document.same(reference):
                differing.append(f"{name}:{line} {difference(reference, document, tokenizer)}")
        verdicts.append(Verdict(name, len(references), Counter(rejected[name].values()), differing))
    assert next(documents, None) is None, "more documents than rows"
    return verdicts


def difference(wanted: Encoded, got: Encoded | None, tokenizer: Any) -> str:
    """Say where two documents part."""
    if got is None:
        return "has no document"
    shared = min(len(wanted.ids), len(got.ids))
    apart = np.flatnonzero(
        (wanted.ids[:shared] != got.ids[:shared]) | (wanted.trained[:shared] != got.trained[:shared])
    )
    at = int(apart[0]) if len(apart) else shared
    what = "ids" if not np.array_equal(wanted.ids, got.ids) else "masks"
    text = [tokenizer.decode(one.ids[max(at - 6, 0) : at + 6]) for one in (wanted, got)]
    return f"{what} differ at token {at} of {len(wanted.ids)}/{len(got.ids)}: {text[0]!r} / {text[1]!r}"
