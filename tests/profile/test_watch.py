"""The `profile:` section: given steps of a real run are recorded, and the run is the same one.

Memory that runs out: exit code 5, what held it by module, and an override with which the same run goes through.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig as ProfilerConfig

from tests.caches import new_cache
from tests.fixtures import trainings
from tuner.errors import MemoryLimitError
from tuner.profile import recorder, watch
from tuner.profile.recorder import StepRecorder
from tuner.run.launch import launch as launch_run
from tuner.run.options import LaunchOptions
from tuner.runtime import phase
from tuner.train import loop
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


MODEL = """
import gc, json, resource, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
)).save_pretrained("wide")
rows = [json.dumps({"prompt": f"{i} ", "completion": "ab" * 120}) for i in range(16)]
Path("rows.jsonl").write_text("\\n".join(rows))
Path("r.yaml").write_text('''
model: {name_or_path: ./wide}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 256}
train: {duration: 1 steps, global_batch_size: 16, micro_batch_size: 16, precision: fp32, device: cpu}
''')
from tuner.run.launch import launch as launch_run
from tuner.cli.main import main
from tuner.config.load import Override, load_recipe
from tuner.errors import MemoryLimitError
from tuner.run import main as run_main
from tuner.runtime import memory
from tuner.run.options import LaunchOptions

# Addresses that are reserved ahead are no memory, and a cap on addresses would have them all to give.
memory._reserve_huge_pages = lambda *given: None
steps = run_main.train_loop
def capped(*given):
    gc.collect()  # or what an earlier run left is freed beneath the cap
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 260 * 2**20, resource.RLIM_INFINITY))
    try:
        return steps(*given)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run_main.train_loop = capped
def train(name, flags):
    overrides = [Override(*pair) for pair in {"name": name, **flags}.items()]
    return launch_run(load_recipe("r.yaml", overrides), LaunchOptions(level="error"))
try:
    train("first", {})
except MemoryLimitError as error:
    hint = error.hint
words = hint.split(" fits ")[0].split()
flags = {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2])}
print("second:", train("second", flags).status, hint, file=sys.stderr)
main(["train", "r.yaml", "--name", "third", "--json"])
"""


@pytest.mark.slow
def test_a_cap_on_addresses_ends_with_5_and_the_override_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(tmp_path / "cache")))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # threads reserve addresses of their own
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))  # large blocks leave no hole behind
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    words = [sys.executable, "-c", MODEL]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "second: finished --train.micro_batch_size " in done.stderr, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "MemoryLimitError"
    assert error["message"].startswith("out of memory in step 1, forward of model.layers.")
    assert "most by activations of model.layers.*.mlp" in error["message"]

    found = json.loads((tmp_path / "runs" / "third" / "profile" / "out-of-memory-rank0.json").read_text())
    tokens, width = 16 * 244, 2048  # rows are documents of 3 or 4 + 240 tokens
    each = {h["owner"]: h["bytes"] for h in found["largest"] if h["part"] == "activations"}
    assert each["model.layers.0.mlp.gate_proj"] == pytest.approx(4 * tokens * width, rel=0.02)
    assert found["asked_bytes"] == each["model.layers.0.mlp.gate_proj"]
    assert found["held_bytes"] == sum(found["parts"].values()) < 400 * 2**20
    assert found["parts"]["activations"] > 0.9 * found["held_bytes"]
    assert found["override_peak_bytes"] < found["held_bytes"] < sum(found["predicted"].values())
    assert found["predicted"]["parameters"] == found["parts"]["parameters"]
    assert found["predicted"]["optimizer"] == found["parts"]["optimizer"]
    assert found["predicted"]["activations"] >= found["parts"]["activations"]
    assert "predicted peak of a step" in done.stderr


def fails(train_state: Any, index: int, *rest: Any) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")


def test_what_lies_between_steps_where_the_step_cannot_be_taken_again(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    monkeypatch.setattr(loop, "optimizer_step", fails)
    with pytest.raises(MemoryLimitError) as raised:
        launch(workplace, "again")
    assert "out of memory in step 1" in raised.value.message and "4,096 bytes requested" in raised.value.message
    assert raised.value.hint is not None and raised.value.hint.startswith("--train.micro_batch_size 2 fits")

    def broken(*given: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(watch, "replay_step", broken)
    with pytest.raises(MemoryLimitError) as raised:
        launch(workplace, "resident")
    assert "out of memory in step 1, between steps: 4,096 bytes requested" in raised.value.message
    assert "weights of model.embed_tokens.weight" in raised.value.message
    assert "the memory could not be examined: ValueError: no" in capfd.readouterr().err
    monkeypatch.setattr(watch, "resident_report", broken)
    with pytest.raises(MemoryLimitError, match="you tried to allocate 4096 bytes"):
        launch(workplace, "neither")
    monkeypatch.setattr(loop, "optimizer_step", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch(workplace, "another")
