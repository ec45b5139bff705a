"""The `profile:` section: given steps of a real run are recorded, and the run is the same one."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig as ProfilerConfig

from tests.caches import new_cache
from tests.fixtures import trainings
from tuner.profile import recorder
from tuner.profile.recorder import StepRecorder
from tuner.run.launch import launch as launch_run
from tuner.run.options import LaunchOptions
from tuner.runtime import phase
from tuner.train.guard import GuardLimits

FLAGS = {"train.duration": "4 steps", "checkpoint.every": "never", "train.micro_batch_size": "4"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe without an adapter, in which every test trains under names of its own."""
    found = trainings.prepare(tmp_path_factory.mktemp("trained"), 1)
    lines = (found / "r.yaml").read_text().splitlines(keepends=True)
    (found / "r.yaml").write_text("".join(line for line in lines if not line.startswith("adapter")))
    return found


@pytest.fixture
def workplace(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(place / "cache")))
    return place


def launch(directory: Path, name: str, **flags: str) -> Path:
    loaded = trainings.loaded(directory, **FLAGS | {"name": name} | flags)
    return launch_run(loaded, LaunchOptions(level="warning")).run_dir


def read_trace(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


@pytest.mark.slow
def test_recorded_steps_compute_the_same(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = launch(workplace, "plain")
    assert not (plain / "profile").exists()
    run = launch(workplace, "recorded", profile__steps="[2, 3, 900]")
    assert trainings.outcome(run) == trainings.outcome(plain)
    assert "profile.steps: 900 comes after the last step, 4" in capfd.readouterr().err
    kinds = (("memory", ""), ("trace", ".gz"))
    names = [f"{kind}-step-{step}-rank0.json{end}" for kind, end in kinds for step in (2, 3)]
    assert sorted(path.name for path in (run / "profile").iterdir()) == names
    ranges = [event["name"] for event in read_trace(run / "profile" / names[3])["traceEvents"] if "dur" in event]
    # Eight rows in microbatches of four.
    turns = ["data", *["forward", "backward"] * 2, "optimizer"]
    assert [name for name in ranges if name[6:] in set(turns)] == [f"tuner.{turn}" for turn in turns]

    found = json.loads((run / "profile" / names[0]).read_text())
    weights = sum(4 * n for n in (300 * 32, *[2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32] * 2, 32))
    buffers = found["peak_parts"]["parameters"] - weights
    assert 0 < buffers < 1000  # rotary frequencies
    assert found["peak_parts"]["gradients"] <= weights
    # Two moments, a count for each tensor, and what the guard knows of the steps so far.
    assert found["peak_parts"]["optimizer"] == 2 * weights + 4 * 20 + 8 * (2 * GuardLimits().window + 2)
    assert found["peak_bytes"] == sum(found["peak_parts"].values()) == max(found["peak_by_phase"].values())
    series = found["timeline"]["bytes"]
    assert max(map(sum, zip(*series.values(), strict=True))) == found["peak_bytes"]
    assert max(series["gradients"]) == weights and series["gradients"][0] == series["gradients"][-1] == 0
    assert max(series["activations"]) > 0 == series["activations"][0]
    assert found["timeline"]["seconds"] == sorted(found["timeline"]["seconds"])
    largest = {(item["owner"], item["part"]): item["bytes"] for item in found["largest"]}
    assert largest["model.embed_tokens.weight", "optimizer"] == 2 * 300 * 32 * 4
    assert largest["model.layers.0.mlp.gate_proj", "activations"] > 0


def test_only_what_is_asked_for(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(recorder, "profile", lambda **asked: given.append(asked) or torch.profiler.profile(**asked))
    run = launch(workplace, "time", profile__steps="[1]", profile__memory="false")
    assert [path.name for path in (run / "profile").iterdir()] == ["trace-step-1-rank0.json.gz"]
    asking = {"profile__steps": "[1]", "profile__lines": "true", "profile__cuda_sync": "true"}
    lined = launch(workplace, "lines", **asking) / "profile"
    plain, with_lines = (
        [event["name"] for event in read_trace(place / "trace-step-1-rank0.json.gz")["traceEvents"] if "dur" in event]
        for place in (run / "profile", lined)
    )
    called = "tuner/train/step.py"
    assert any(called in name for name in with_lines) and not any(called in name for name in plain)
    assert json.loads((lined / "memory-step-1-rank0.json").read_text())["peak_parts"]["activations"] > 0
    assert [one["experimental_config"] is None for one in given] == [True, False]
    usual, asked = (config.__getstate__() for config in (ProfilerConfig(), given[1]["experimental_config"]))
    assert asked == ProfilerConfig(enable_cuda_sync_events=True).__getstate__() != usual
    run = launch(workplace, "memory", profile__steps="[1]", profile__time="false")
    assert [path.name for path in (run / "profile").iterdir()] == ["memory-step-1-rank0.json"]


@pytest.mark.parametrize(
    "broken", ["stop", *(pytest.param(name, marks=pytest.mark.slow) for name in ("start", "memory", "write_trace"))]
)
def test_a_failing_profile_is_a_warning(
    workplace: Path, broken: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space")

    whole = getattr(StepRecorder, broken)
    monkeypatch.setattr(StepRecorder, broken, lambda self, *rest: (whole(self, *rest), fail())[1])
    run = launch(workplace, f"broken-{broken}", profile__steps="[2]")
    err = capfd.readouterr().err
    assert "the recording could not be" in err and "OSError: no space; training continues" in err
    assert trainings.record(run)["status"] == "finished"
    left = [path.name for path in (run / "profile").iterdir()] if (run / "profile").exists() else []
    assert left == (["trace-step-2-rank0.json.gz"] if broken == "memory" else [])


def test_a_step_that_fails_leaves_no_recording_behind(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.train import loop

    def failing(train_state: Any, index: int, *rest: Any) -> None:
        phase.enter_part(index + 1, "forward")
        raise RuntimeError("the step's own")

    monkeypatch.setattr(loop, "optimizer_step", failing)
    for name in ("one", "two"):  # a recorder that is left running refuses the next
        with pytest.raises(RuntimeError, match="the step's own"):
            launch(workplace, name, profile__steps="[1]")
        assert not list((workplace / "runs" / name / "profile").iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_recorded_step_on_a_gpu_has_the_allocators_history(workplace: Path) -> None:
    plain = launch(workplace, "plain-gpu", train__device="cuda", train__compile="false")
    run = launch(workplace, "recorded-gpu", train__device="cuda", train__compile="false", profile__steps="[2]")
    assert trainings.outcome(run) == trainings.outcome(plain)
    found = json.loads((run / "profile" / "memory-step-2-rank0.json").read_text())
    assert found["peak_bytes"] == sum(found["peak_parts"].values())
    assert found["peak_parts"]["optimizer"] > found["peak_parts"]["parameters"] > 0
    assert (run / "profile" / "memory-step-2-rank0.pickle").stat().st_size > 1000
