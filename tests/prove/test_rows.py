"""Made-up rows: every layout computes the same ones, each once."""

import numpy as np
import pytest

from tuner.config.methods import DpoMethod, KtoMethod, PretrainMethod, SftMethod
from tuner.config.methods import Method as MethodSection
from tuner.parallel.mesh import Mesh
from tuner.prove.training import STEPS_APART, ProofRows
from tuner.prove.twin import LONGEST, ROWS
from tuner.train.methods.method import build_method

SECTIONS: list[MethodSection] = [
    SftMethod(), PretrainMethod(), DpoMethod(kind="dpo", reference="columns"),
    KtoMethod(kind="kto", reference="columns"),
]  # fmt: skip
MESHES = [{"shard": 2}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_processes_have_the_rows_of_one_between_them(
    section: MethodSection, accumulate: int, axes: dict[str, int]
) -> None:
    method = build_method(section)
    rows = ProofRows(section.examples, 100, accumulate, seed=1)
    alone = rows.step(0, method, Mesh())
    seen = []
    meshes = {(mesh := Mesh(axes, rank)).data_rank: mesh for rank in range(Mesh(axes).size)}
    for _, mesh in sorted(meshes.items()):
        step = rows.step(0, method, mesh)
        assert method.counts(step) == method.counts(alone)
        assert len(step.micro) == accumulate
        seen += [batch.input_ids for batch in step.micro]
    assert np.array_equal(np.concatenate(seen), np.concatenate([batch.input_ids for batch in alone.micro]))


def test_rows_are_uneven_and_come_again() -> None:
    rows, method = ProofRows(SftMethod().examples, 100, 1, seed=1), build_method(SftMethod())
    first, second, again = (rows.each(index, method).micro for index in (0, 1, STEPS_APART))
    assert len(first) == ROWS and max(len(batch.input_ids) for batch in first) == LONGEST
    assert len({len(batch.input_ids) for batch in first}) == 5
    assert len(first[0].lengths) == 1 and max(len(batch.lengths) for batch in first) > 2
    assert not np.array_equal(first[0].input_ids, second[0].input_ids)
    assert np.array_equal(first[0].input_ids, again[0].input_ids)
    assert first[0].trained_positions[0] > 0 and all(batch.input_ids.max() < 100 for batch in first)
