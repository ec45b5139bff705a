"""A timeline adds up, names its parts, and is the same whether it is looked at by module or in all."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.predict_cases import LONG, Case
from tests.fixtures.predict_counted import resolved_case
from tests.fixtures.predict_traced import predicted
from tuner.profile.timeline import memory_timeline, parts_of
from tuner.profile.tracing import StepTrace, cuda_stand_in, trace_step
from tuner.runtime.device import target


def traced(case: Case, directory: Path) -> StepTrace:
    resolved, launch, step = resolved_case(case, directory)
    return trace_step(resolved, launch, step, step.micro[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> StepTrace:
    """A step of a small Llama on one process, and an evaluation."""
    return traced(Case("llama"), tmp_path_factory.mktemp("plain"))


def test_parts_add_up_to_the_peak_that_was_counted(plain: StepTrace, tmp_path: Path) -> None:
    trace, said = plain, predicted(*resolved_case(Case("llama"), tmp_path))
    given = {number for number, storage in enumerate(trace.storages) if storage.given}
    timeline = memory_timeline(trace, {})
    whole = said.parameters + said.optimizer
    phases = [moment.phase for moment in timeline.moments]
    assert list(dict.fromkeys(phases)) == ["build", "forward", "backward", "optimizer", "evaluation"]
    assert 0 <= timeline.peak.total - whole - said.peak <= sum(trace.storages[number].size for number in given)
    assert timeline.peak.parts["parameters"] == said.parameters
    ends = [moment for moment in timeline.moments if moment.phase == "optimizer"]
    assert ends[0].parts["gradients"] == said.gradients and ends[0].parts["activations"] == 0
    evaluation = timeline.peak_of("evaluation")
    assert evaluation is not None and evaluation.parts["gradients"] == evaluation.parts["activations"] == 0


def test_every_layer_keeps_as_much_as_the_other(plain: StepTrace, tmp_path: Path) -> None:
    layers = memory_timeline(plain, {}).layers
    assert list(layers) == ["model.layers.0", "model.layers.1", ""]
    assert layers["model.layers.0"] == layers["model.layers.1"] > layers[""] > 0
    again = memory_timeline(traced(Case("llama", {"train.gradient_checkpointing": "full"}), tmp_path), {})
    assert again.layers["model.layers.0"] < layers["model.layers.0"] / 3
    backward = [m for m in again.moments if m.phase == "backward" and m.module == "model.layers.0"]
    assert max(m.parts["activations"] for m in backward) > sum(again.layers.values())


@pytest.mark.slow
def test_shards_are_gathered_and_gradients_reduced(plain: StepTrace, tmp_path: Path) -> None:
    trace = traced(Case("llama", {}, LONG, 4), tmp_path)
    assert {"gathered", "reduced", "gradients"} <= set(parts_of(trace))
    timeline = memory_timeline(trace, {})
    whole = memory_timeline(plain, {}).peak.parts["parameters"]
    assert timeline.peak.parts["parameters"] == pytest.approx(whole / 4, rel=0.05)
    assert 0 < max(moment.parts["gathered"] for moment in timeline.moments) < 2 * whole
    copies = memory_timeline(traced(Case("llama", {"parallel.shard": "none"}, LONG, 4), tmp_path), {})
    assert copies.peak.parts["parameters"] == whole and copies.peak.parts["gathered"] == 0


def test_kernels_of_another_device_are_chosen_within_the_stand_in_alone() -> None:
    import torch

    tensor = torch.zeros(1)
    with cuda_stand_in():
        assert target(tensor) == "cuda"
    assert target(tensor) == "cpu"


@pytest.mark.slow
def test_the_logits_of_a_gpu_are_bounded_by_its_memory(tmp_path: Path) -> None:
    resolved, rank_info, step = resolved_case(Case("llama"), tmp_path)

    def largest(total_bytes: int) -> int:
        """Of the storages that the loss makes."""
        facts = replace(resolved.facts, kind="cuda", total_bytes=total_bytes)
        trace = trace_step(replace(resolved, facts=facts), rank_info, step)
        return max(storage.size for storage in trace.storages if storage.phase == "forward" and not storage.module)

    row = 4 * 128  # bytes of the logits of 97 tokens, filled up
    assert largest(80 << 30) == len(step.micro[0].trained_positions) * row
    assert largest(64 * 128 * 30) == 30 * row  # chunks of thirty positions
