"""Checks and figures inside of a run: nothing of its bits moves, and a damaged state replaces no good checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import trainings
from tuner.checkpoint.manifest import step_dirs
from tuner.errors import ExitCode, MachineError, VerificationError
from tuner.parallel.health import KnownProducts
from tuner.run.tasks.rank_times import RankTime, slow_ranks
from tuner.train import loop
from tuner.train.progress import CLOCKED

EVERYTHING = {
    "health__every": "3 steps",
    "health__before_saves": "true",
    "health__times_every": "2 steps",
    "logging__internals": "2 steps",
}
STEPS = "6 steps"


@pytest.fixture
def directory(workplace: Path) -> Path:
    return trainings.emptied(workplace, layers=2)


def test_the_bits_are_those_of_a_run_without_any_of_it(directory: Path) -> None:
    plain = trainings.launch(directory, train__duration=STEPS, name="plain").run_dir
    watched = trainings.launch(directory, train__duration=STEPS, name="watched", **EVERYTHING).run_dir
    log = [line for line in trainings.lines(watched) if line["kind"] == "train"]
    assert trainings.outcome(plain)["sha256"] == trainings.outcome(watched)["sha256"]
    determined = [{key: line[key] for key in trainings.DETERMINED} for line in log]
    assert trainings.outcome(plain)["log"] == determined
    kinds = [(line["kind"], line["step"]) for line in trainings.lines(watched)]
    assert kinds == [
        *[("train", 1), ("train", 2), ("times", 2), ("internals", 2), ("train", 3), ("health", 3)],
        *[("train", 4), ("times", 4), ("internals", 4), ("train", 5)],
        *[("train", 6), ("times", 6), ("internals", 6), ("health", 6)],
    ]
    internals = next(line for line in trainings.lines(watched) if line["kind"] == "internals")
    names = {name.partition("/")[0] for name in internals if "/" in name}
    assert names == {"weight_rms", "grad_rms", "update_rms", "activation_rms", "attention_logit_max", "dead_share"}
    assert internals["dead_share/layers.1"] < 0.5 < internals["weight_rms/layers.0"] + 1


@pytest.mark.slow
def test_a_resumed_run_keeps_its_lines_and_its_bits(directory: Path) -> None:
    whole = trainings.launch(directory, train__duration=STEPS, name="whole", **EVERYTHING).run_dir
    flags = {"train__duration": STEPS, "name": "parts", **EVERYTHING}
    trainings.launch(directory, train__stop_after="5 steps", **flags)
    parts = trainings.launch(directory, "auto", **flags).run_dir
    clocked = {*CLOCKED, "internals_s", "check_s", "compute_s", "compute_s_max", "wait_s_max"}

    def determined(run: Path) -> list[dict[str, Any]]:
        return [{key: line[key] for key in line if key not in clocked} for line in trainings.lines(run)]

    assert determined(parts) == determined(whole)
    assert trainings.outcome(parts)["sha256"] == trainings.outcome(whole)["sha256"]


def at_step(index: int, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Have ``work`` done to the state of training after the step of an index (from 0)."""
    real = loop.optimizer_step

    def planted(state: Any, number: int, *rest: Any) -> Any:
        scalars = real(state, number, *rest)
        if number == index:
            work(state)
        return scalars

    monkeypatch.setattr(loop, "optimizer_step", planted)


def test_a_frozen_weight_that_changes_ends_the_run_before_it_saves(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(state: Any) -> None:
        weight = state.root.model.get_submodule("model.layers.1.mlp.up_proj").base_layer.weight
        weight.data.view(-1).view(torch.int32)[5] ^= 1

    at_step(4, monkeypatch, damage)
    with pytest.raises(VerificationError) as raised:
        trainings.launch(directory, train__duration=STEPS, health__before_saves="true")
    said = raised.value.message
    assert raised.value.exit_code == ExitCode.VERIFICATION
    assert said.startswith("health check after step 6: rank 0: model.layers.1.mlp.up_proj.base_layer.weight, which")
    assert said.endswith("changed since the launch began; all was well after step 4")
    run = directory / "runs" / "r"
    assert [step for step, _ in step_dirs(run / "checkpoints")] == [4]
    assert raised.value.hint is not None and raised.value.hint.endswith(f"then: tuner resume {run}")


def test_a_device_that_computes_wrongly_ends_the_run_with_code_4(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = KnownProducts.problem, []

    def wrong_at_the_third(products: KnownProducts) -> str | None:
        calls.append(1)
        if len(calls) == 3:
            products._whole[0][0] += 1
        return real(products)

    monkeypatch.setattr(KnownProducts, "problem", wrong_at_the_third)
    said = "health check after step 4: rank 0 .*a product of matrices is wrong"
    with pytest.raises(MachineError, match=said) as raised:
        trainings.launch(directory, train__duration=STEPS, health__every="2 steps", checkpoint__every="2 steps")
    assert raised.value.exit_code == ExitCode.ENVIRONMENT
    assert [step for step, _ in step_dirs(directory / "runs" / "r" / "checkpoints")] == [2]


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([(1.0, 0.0, 10)], {}),
        ([(1.0, 0.0, 10), (1.6, 0.0, 10)], {1: 1.6}),
        ([(1.0, 0.0, 10), (1.6, 0.0, 16)], {}),  # more tokens
        ([(1.0, 0.6, 10), (1.0, 0.0, 10), (1.0, 0.0, 10)], {0: 1.6}),  # it waits for its data
        ([(0.0, 0.0, 0), (0.0, 0.0, 0)], {}),
    ],
)
def test_who_is_slow(times: list[tuple[float, float, int]], slow: dict[int, float]) -> None:
    found = slow_ranks([RankTime(compute, data, tokens) for compute, data, tokens in times], 1.5)
    assert found == pytest.approx(slow)
