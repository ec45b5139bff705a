"""Losses on held-out documents: weighted by tokens, by source, at any batch size, and equal to plain transformers'."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures import tables
from tests.fixtures.rows import MadeRows
from tests.model.tiny import VOCAB
from tuner.data.batches import Batch, collate
from tuner.data.prepared import Row
from tuner.model.output_layer import OutputLayer
from tuner.model.root import CausalLM
from tuner.parallel.mesh import Mesh
from tuner.train.evaluate import HeldOut, evaluate, held_out, source_names
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
