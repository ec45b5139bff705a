"""Evaluations by a method's own terms: by source, at any batch size, on any number of processes, as each pair alone."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.rows import MadeRows
from tests.model.tiny import VOCAB
from tests.train.test_evaluate import step_config
from tuner.config.methods import DpoMethod
from tuner.data.prepared import Row
from tuner.model.root import CausalLM
from tuner.parallel.mesh import Mesh
from tuner.train import evaluate as evaluation
from tuner.train.evaluate import ByTerms, Evaluation, HeldOut, evaluate
from tuner.train.methods.method import build_method

BETA = 0.3
PAIRS = ((0, 1, 2), (5,), (3, 6), (4,))
"""Pairs of each row, which are not in order: of the three sources the first has 2, the second 3 and the last 2."""
SOURCES = (("a", "b", "c"), (4, 6, 4))


class PairRows(MadeRows):
    """Packed pairs in memory, with a reference's log-probability of each answer."""

    max_length = 64

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pairs = [[rng.integers(3, VOCAB, int(n)) for n in rng.integers(4, 9, 2)] for _ in range(7)]
        self.trained = [[int(n) for n in rng.integers(1, 4, 2)] for _ in range(7)]
        self.reference = rng.normal(-9, 2, 14).astype(np.float32)
        super().__init__([self._row(numbers) for numbers in PAIRS])

    def _row(self, numbers: tuple[int, ...]) -> Row:
        ids = [side for number in numbers for side in self.pairs[number]]
        trained = [n for number in numbers for n in self.trained[number]]
        flags = [np.arange(len(one)) >= len(one) - n for one, n in zip(ids, trained, strict=True)]
        documents = np.array([2 * number + side for number in numbers for side in (0, 1)])
        lengths = np.array([len(one) for one in ids], dtype=np.int32)
        columns = {"reference": self.reference[documents]}
        return Row(np.concatenate(ids), np.concatenate(flags), lengths, documents, columns)


def expected(root: CausalLM, rows: PairRows, numbers: range) -> dict[str, float]:
    """The means over some pairs, each answer alone through the model itself."""
    found: list[tuple[float, float]] = []
    logps: list[tuple[float, float]] = []
    for number in numbers:
        rewards, summed_logps = [], []
        for side, (ids, n) in enumerate(zip(rows.pairs[number], rows.trained[number], strict=True)):
            tokens = torch.tensor(ids)
            with torch.no_grad():
                log_p = torch.log_softmax(root.model(input_ids=tokens[None]).logits[0, :-1].double(), -1)
            summed = float(log_p.gather(1, tokens[1:, None])[-n:].sum())
            summed_logps.append(summed)
            rewards.append(BETA * (summed - float(rows.reference[2 * number + side])))
        found.append((rewards[0], rewards[1]))
        logps.append((summed_logps[0], summed_logps[1]))
    count = len(found)
    return {
        "loss": sum(math.log1p(math.exp(b - a)) for a, b in found) / count,
        "reward_chosen": sum(a for a, _ in found) / count,
        "reward_rejected": sum(b for _, b in found) / count,
        "margin": sum(a - b for a, b in found) / count,
        "accuracy": sum(a > b for a, b in found) / count,
        "logp_chosen": sum(a for a, _ in logps) / count,
        "logp_rejected": sum(b for _, b in logps) / count,
    }


def measured(root: CausalLM, held: HeldOut, micro: int, window: int = 4, **more: Any) -> Evaluation:
    own = ByTerms(build_method(DpoMethod(beta=BETA)), window)
    return evaluate(root, step_config(**more), held, micro, None, by_terms=own)


@pytest.mark.parametrize(("micro", "window"), [(1, 1), (1, 4), (2, 2), (4, 4)])
def test_figures_by_source_are_those_of_the_pairs_alone(root: CausalLM, micro: int, window: int) -> None:
    rows: Any = PairRows()
    result = measured(root, HeldOut(rows, *SOURCES), micro, window)
    line = result.line()
    for name, numbers in (("a", range(2)), ("b", range(2, 5)), ("c", range(5, 7)), ("", range(7))):
        wanted = expected(root, rows, numbers)
        for figure, value in wanted.items():
            found = line[f"{figure}/{name}" if name else figure]
            assert found == pytest.approx(value, rel=1e-6, abs=3e-7), figure  # log-ratios are near 9
    assert len(line) == 4 * len(wanted)
    assert result.tokens == sum(map(sum, rows.trained)) == sum(part.tokens for part in result.sources.values())
    alone = measured(root, HeldOut(rows, ("a",), (14,)), micro, window)
    assert alone.line() == pytest.approx(expected(root, rows, range(7)), rel=1e-6, abs=3e-7)


def test_processes_take_their_shares_and_as_many_forwards(root: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:

    rows: Any = PairRows()
    held = HeldOut(rows, *SOURCES)
    forwards: list[int] = []
    real = evaluation.microbatch_terms
    monkeypatch.setattr(
        evaluation, "microbatch_terms", lambda *args: (forwards.append(len(args[2].documents)), real(*args))[1]
    )
    whole = measured(root, held, 1)
    assert sum(forwards) == 14
    shares, counts = [], []
    for rank in range(2):
        forwards.clear()
        shares.append(measured(root, held, 1, mesh=Mesh({"shard": 2}, rank)))
        counts.append(len(forwards))
    assert counts[0] == counts[1], "a process that another waits for takes part with nothing"
    assert whole.tokens == sum(share.tokens for share in shares)
    for name in held.sources:
        parts = [share.sources[name] for share in shares if name in share.sources]
        assert sum(part.tokens for part in parts) == whole.sources[name].tokens


def test_a_mean_over_nothing_is_left_out(root: CausalLM) -> None:
    rows: Any = PairRows()
    held = HeldOut(rows, ("a", "b"), (12, 2))
    own = ByTerms(build_method(DpoMethod(beta=BETA)), 1)
    first = evaluate(root, step_config(), held, 1, 1, by_terms=own)
    assert list(first.sources) == ["a"] and "accuracy/b" not in first.line()
    empty = replace(first, figures={}, sources={"b": first})
    assert list(empty.line()) == ["loss", "loss/b"]
