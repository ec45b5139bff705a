"""A run that goes from mesh to mesh by its checkpoints takes the steps of one process, and every copy stays a copy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.processes import run_ranks
from tests.parallel.cut_rows import Case, write
from tests.parallel.test_health import flip
from tests.train.synthetic import resume
from tuner.checkpoint.load import content_sha256, read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.parallel.health import Copy, first_difference, sums_of
from tuner.runtime.parts import local
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly, run_tensors
from tuner.train.step import optimizer_step

Figures = list[tuple[float, float]]
TENSOR, SEQUENCE, EXPERT = ({key: 2} for key in ("tensor", "sequence", "expert"))
STEPS = 2
"""That each mesh takes."""


def walked(assembly: Assembly, first: int, source: Path | None, target: Path) -> Figures:
    """Steps from a checkpoint, which are saved; losses and gradient norms. Collective."""
    state = assembly.train_state
    if source is not None:
        resume(assembly, source, first)
        again = save(CheckpointDir(target / "again", "r"), first, run_tensors(state), {}, {})
        assert content_sha256(open_checkpoint(again)) == content_sha256(open_checkpoint(source))
    found = [optimizer_step(state, i, assembly.batches.step(i), 1.0).read() for i in range(first, first + STEPS)]
    save(CheckpointDir(target, "r"), first + STEPS, run_tensors(state), {}, {})
    return [(step.loss, step.grad_norm) for step in found]


def check_copies(assembly: Assembly, processes: int, wrong_on: int) -> None:
    """No copy differs; then one does, of a norm that a tensor group has whole, and it is found. Collective."""
    ranks = Collective(gloo_group())
    named = run_tensors(assembly.train_state)
    copies = [Copy.of(name, tensor, processes) for name, tensor in named.items()]
    several = [copy for copy in copies if copy.copies > 1]
    assert any("layernorm" in copy.name for copy in several)
    assert first_difference(several, sums_of(several), ranks) is None
    name = next(copy.name for copy in several if "input_layernorm" in copy.name)
    if ranks.rank == wrong_on:
        flip(local(named[name]), 0, 5)
    found = first_difference(several, sums_of(several), ranks)
    assert found is not None and (found.name, found.tensors) == (name, (name,))


def near(step: tuple[float, float]) -> tuple[Any, Any]:
    """A loss within 1e-6; a gradient norm within 1e-5: Adafactor's updates make more of what float32 rounds, up to 2e-6
    after two steps."""
    loss, norm = step
    return pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5)


def held_to_one_process(case: Case, meshes: list[dict[str, Any]], tmp_path: Path) -> None:
    """Walk from mesh to mesh, then on in one process, beside one process alone."""
    write(tmp_path, case.family)
    alone, expected = case.assembly(tmp_path, None), []
    for number in range(len(meshes) + 1):
        expected += walked(alone, STEPS * number, None, tmp_path / "alone")

    def work(rank: int) -> None:
        source = None
        for number, parallel in enumerate(meshes):
            laid_out = replace(case, sequence=1, sections={**case.sections, "parallel": parallel})
            assembly, target = laid_out.assembly(tmp_path, rank), tmp_path / f"mesh-{number}"
            found = walked(assembly, STEPS * number, source, target)
            for one, other in zip(expected[STEPS * number :], found, strict=False):
                assert other == near(one), (parallel, one, other)
            source = target / f"step-{STEPS * (number + 1)}"
            if parallel == TENSOR:
                check_copies(assembly, case.processes, wrong_on=case.processes - 1)

    assert run_ranks(case.processes, tmp_path, work, timeout_s=60 if len(meshes) == 2 else 600) == [0] * case.processes
    last = STEPS * len(meshes)
    found = walked(case.assembly(tmp_path, None), last, tmp_path / f"mesh-{len(meshes) - 1}" / f"step-{last}", tmp_path)
    assert found == [near(one) for one in expected[last:]]
    wanted = dict(read_tensors(open_checkpoint(tmp_path / "alone" / f"step-{last + STEPS}")))
    for name, tensor in read_tensors(open_checkpoint(tmp_path / f"step-{last + STEPS}")):
        apart = torch.linalg.vector_norm((tensor - wanted.pop(name)).double())
        assert apart <= 1e-4 * torch.linalg.vector_norm(tensor.double()).clamp_min(1e-12), name
    assert not wanted


@pytest.mark.multi
def test_from_shards_to_split_layers_to_one_process(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"ema": {"decay": 0.9}}
    held_to_one_process(Case("qwen3", processes=2, sections=sections), [{}, TENSOR], tmp_path)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "optimizer",
    [{"kind": "adamw"}, {"kind": "adafactor"}, {"kind": "adamw", "offload": "host"}],
    ids=["adamw", "adafactor", "host"],
)
@pytest.mark.parametrize("family", ["qwen3-moe", "gemma3"])
def test_over_every_axis_of_four_processes(family: str, optimizer: dict[str, Any], tmp_path: Path) -> None:
    spread = [EXPERT] if "moe" in family else []
    case = Case(family, processes=4, machines=2, micro=1, sections={"optimizer": optimizer, "ema": {"decay": 0.9}})
    both = {**TENSOR, **SEQUENCE}
    held_to_one_process(case, [{}, TENSOR, *spread, SEQUENCE, both, {"shard": "hybrid", **TENSOR}], tmp_path)
