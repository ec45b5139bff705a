"""Memory that runs out: exit code 5, what held it by module, and an override with which the same run goes through."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.caches import new_cache
from tests.profile.test_watch import launch, place, workplace  # noqa: F401 - fixtures
from tuner.errors import MemoryLimitError
from tuner.profile import watch
from tuner.train import loop

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
from tuner.config.load import load_recipe
from tuner.config.load import Override
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
