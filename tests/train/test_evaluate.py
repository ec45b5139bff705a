"""Losses on held-out documents, weighted by tokens and equal to plain transformers', and evaluations by a method's
own terms: by source, at any batch size.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import tables
from tests.fixtures.rows import MadeRows
from tests.model.tiny import VOCAB
from tuner.config.methods import DpoMethod
from tuner.data.batches import Batch, collate
from tuner.data.prepared import Row
from tuner.model.output_layer import OutputLayer
from tuner.model.root import CausalLM
from tuner.parallel.mesh import Mesh
from tuner.train import evaluate as evaluation
from tuner.train.evaluate import ByTerms, Evaluation, HeldOut, evaluate, held_out, source_names
from tuner.train.methods.method import build_method
from tuner.train.methods.pretrain import TokenMean
from tuner.train.step import StepConfig, microbatch_terms

LENGTHS = [[9, 4], [12], [5, 5, 3], [7, 6]]
"""Documents of each row."""


class Rows(MadeRows):
    """Packed rows in memory; documents are numbered as they come, but those of the first row are turned round."""

    max_length = 16

    def __init__(self, trained_share: float = 0.5) -> None:
        rng = np.random.default_rng(0)
        first, made = 0, list[Row]()
        for lengths in LENGTHS:
            documents = np.arange(first, first + len(lengths))
            first += len(lengths)
            n = sum(lengths)
            numbers = documents[::-1].copy() if not made else documents
            trained = rng.random(n) < trained_share
            made.append(Row(rng.integers(3, VOCAB, n), trained, np.array(lengths, dtype=np.int32), numbers))
        super().__init__(made)


def step_config(bf16: bool = False, mesh: Mesh = Mesh()) -> StepConfig:  # noqa: B008 - frozen
    import contextlib

    autocast: Any = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if bf16 else contextlib.nullcontext
    return StepConfig(torch.device("cpu"), autocast, None, 0, mesh)


def expected(root: CausalLM, rows: Rows) -> dict[int, tuple[float, int]]:
    """Document -> (summed loss, trained tokens), each document alone through the model itself."""
    model = root.model
    found = {}
    for row in rows:
        parts = np.split(np.arange(len(row.input_ids)), np.cumsum(row.lengths)[:-1])
        for number, at in zip(row.documents, parts, strict=True):
            ids = torch.tensor(row.input_ids[at])
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1].double()
            kept = torch.tensor(row.trained[at][1:])
            losses = torch.nn.functional.cross_entropy(logits[kept], ids[1:][kept], reduction="none")
            found[int(number)] = (float(losses.sum()), int(kept.sum()))
    return found


@pytest.mark.parametrize("micro", [1, 3])
def test_losses_by_source_are_those_of_the_documents_alone(root: CausalLM, micro: int) -> None:
    rows: Any = Rows()
    documents = expected(root, rows)
    result = evaluate(root, step_config(), HeldOut(rows, ("a", "b", "c"), (1, 4, 3)), micro, None)
    for name, numbers in (("a", [0]), ("b", [1, 2, 3, 4]), ("c", [5, 6, 7])):
        total, count = (sum(documents[i][k] for i in numbers) for k in (0, 1))
        assert result.sources[name].tokens == count
        assert result.sources[name].loss == pytest.approx(total / count, rel=1e-6)
    assert result.tokens == sum(part.tokens for part in result.sources.values())
    weighted = sum(part.loss * part.tokens for part in result.sources.values())
    assert result.loss * result.tokens == pytest.approx(weighted, rel=1e-15)
    assert result.line() == {"loss": result.loss, **{f"loss/{k}": result.sources[k].loss for k in "abc"}}


def test_rows_are_shared_out_by_data_rank(root: CausalLM) -> None:
    rows: Any = Rows()
    held = HeldOut(rows, ("a",), (8,))
    meshes = [Mesh({"shard": 2, "tensor": 2}, rank) for rank in range(4)]
    found = [evaluate(root, step_config(mesh=mesh), held, 1, None) for mesh in meshes]
    assert found[0] == found[1] != found[2] == found[3]  # those along `tensor` compute the same
    assert found[0].tokens + found[2].tokens == evaluate(root, step_config(), held, 1, None).tokens


def test_one_source_has_no_parts_and_max_rows_bounds_it(root: CausalLM) -> None:
    rows: Any = Rows()
    documents = expected(root, rows)
    whole = evaluate(root, step_config(), HeldOut(rows, ("a",), (8,)), 2, None)
    assert whole.line() == {"loss": whole.loss}
    assert whole.loss == pytest.approx(sum(x for x, _ in documents.values()) / whole.tokens, rel=1e-6)
    first = evaluate(root, step_config(), HeldOut(rows, ("a", "b"), (2, 6)), 2, 1)
    assert first.tokens == documents[0][1] + documents[1][1]
    assert list(first.sources) == ["a"]  # no row of the other was read


@pytest.mark.parametrize("bf16", [False, True])
def test_the_loss_is_the_one_that_training_computes(root: CausalLM, bf16: bool) -> None:
    rows: Any = Rows()
    batch: Batch = collate([rows.row(i) for i in range(4)])
    held = HeldOut(rows, ("a", "b"), (3, 5))
    result = evaluate(root, step_config(bf16), held, 4, None)
    with torch.no_grad():
        terms = microbatch_terms(root, TokenMean(), batch, step_config(bf16))
    assert result.loss * result.tokens == pytest.approx(float(terms.losses["loss"].value), rel=1e-6)


def test_rows_without_a_trained_token(root: CausalLM) -> None:
    rows: Any = Rows(0.0)
    result = evaluate(root, step_config(), HeldOut(rows, ("a", "b"), (3, 5)), 2, None)
    assert (result.loss, result.tokens, result.sources) == (0.0, 0, {})


def test_position_losses_in_chunks_with_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    targets = torch.randint(11, (7,))
    monkeypatch.setattr("tuner.model.output_layer.CHUNK_LOGITS", {"cpu": 3 * 11})
    monkeypatch.setattr("tuner.model.output_layer.BLOCK_LOGITS", {"cpu": 2 * 11})
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, targets, reduction="none")
    torch.testing.assert_close(OutputLayer(weight, bias).losses(hidden, targets), wanted)
    assert OutputLayer(weight).losses(hidden[:0], targets[:0]).shape == (0,)


@pytest.mark.parametrize(("paths", "names"), tables.cases(__file__, "names_of_sources"))
def test_names_of_sources(paths: list[str], names: list[str]) -> None:
    assert source_names(paths) == tuple(names)
    assert len(set(names)) == len(names)


def test_sources_that_gave_nothing_are_left_out(tmp_path: Path) -> None:
    rows: Any = Rows()
    held = held_out(rows, [3, 0, 5], ["/d/a.jsonl", "/d/b.jsonl", "/d/c.jsonl"])
    assert (held.sources, held.documents) == (("a", "c"), (3, 5))


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


def expected_terms(root: CausalLM, rows: PairRows, numbers: range) -> dict[str, float]:
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
        "reward_chosen": sum(a for a, _ in found) / count, "reward_rejected": sum(b for _, b in found) / count,
        "margin": sum(a - b for a, b in found) / count, "accuracy": sum(a > b for a, b in found) / count,
        "logp_chosen": sum(a for a, _ in logps) / count, "logp_rejected": sum(b for _, b in logps) / count,
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
        wanted = expected_terms(root, rows, numbers)
        for figure, value in wanted.items():
            found = line[f"{figure}/{name}" if name else figure]
            assert found == pytest.approx(value, rel=1e-6, abs=3e-7), figure  # log-ratios are near 9
    assert len(line) == 4 * len(wanted)
    assert result.tokens == sum(map(sum, rows.trained)) == sum(part.tokens for part in result.sources.values())
    alone = measured(root, HeldOut(rows, ("a",), (14,)), micro, window)
    assert alone.line() == pytest.approx(expected_terms(root, rows, range(7)), rel=1e-6, abs=3e-7)


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
