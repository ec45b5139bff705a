"""`profile` measures the setup that training runs, saves nothing, and ends with exit code 5 where it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.export.runs import write_base
from tuner.config.load import load_recipe
from tuner.data.building.prepare import prepare
from tuner.data.building.request import prepare_request
from tuner.data.prepared import open_prepared
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile.measure import ProfileReport, _out_of_memory, duration_text, measure
from tuner.runtime.launch import Launch
from tuner.train.setup import resolve

SINGLE = Launch(0, 1, 0, 1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", "qwen3")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{6 + i} w{7 + i}"},
                {"role": "assistant", "content": f"w{20 + i}"},
            ]
        }
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(
        "version: 1\nmodel: {name_or_path: base}\ndata: {train: rows.jsonl, max_length: 32}\n"
        "train: {duration: 2 epochs, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}\n"
    )
    return tmp_path / "r.yaml"


def profiled(recipe: Path, limit: int | None = None, adapter: str = "none", **optimizer: str) -> ProfileReport:
    from tuner.config.overrides import Override

    flags = {"adapter.kind": adapter, **{f"optimizer.{key}": value for key, value in optimizer.items()}}
    wish = load_recipe(recipe, [Override(*flag) for flag in flags.items()]).recipe
    request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    prepared = open_prepared(prepare(request).path)
    resolved = resolve(wish, request.max_length, SINGLE)
    return measure(resolved, prepared, request.tokenizer, SINGLE, steps=2, limit_bytes=limit)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer's own
def test_compiled_layers_are_measured_as_they_are_and_timed_compiled(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    from tuner.model import compile as compiling

    plain = profiled(recipe)
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    text = recipe.read_text().replace("train: {", "train: {compile: true, ")
    recipe.write_text(text)
    counters.clear()
    report = profiled(recipe)
    assert counters["stats"]["unique_graphs"] == 1
    assert report.memory["weights"] == plain.memory["weights"]
    assert report.peak_bytes >= plain.peak_bytes


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_parts_are_those_of_the_model(recipe: Path, adapter: str) -> None:
    report = profiled(recipe, adapter=adapter)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(recipe.parent / "base", dtype=torch.float32)
    buffers = sum(b.numel() * b.element_size() for b in base.buffers())
    size = sum(p.numel() * 4 for p in base.parameters())
    tensors = len(list(base.parameters()))
    if adapter == "none":
        assert report.memory["weights"] == size + buffers
        assert report.memory["optimizer"] == 2 * size + 4 * tensors
        assert 0 < report.memory["gradients"] <= size
    else:
        added = report.memory["weights"] - size - buffers
        assert 0 < added < size * 2
        assert 0 <= report.memory["optimizer"] - 2 * added < 4 * 100
    assert report.memory["activations"] > 0
    assert sum(report.memory.values()) == report.peak_bytes
    assert report.step_s == pytest.approx(sum(report.times.values()))
    assert all(seconds > 0 for seconds in report.times.values())
    assert report.fits and report.text().startswith("peak ") and "fits in" in report.text()
    assert not (recipe.parent / "runs").exists()


def test_state_of_other_optimizers_is_counted_under_their_names(recipe: Path) -> None:
    """Momentum is one number a weight; one of the user's own allocates it in its first step."""
    (recipe.parent / "own.py").write_text("from torch.optim import SGD\n")
    whole = profiled(recipe).memory["optimizer"]
    sgd = profiled(recipe, kind="sgd", lr="0.1")
    own = profiled(recipe, kind="custom", use=f"{recipe.parent}/own.py:SGD", lr="0.1", options="{momentum: 0.9}")
    assert sgd.memory["optimizer"] == own.memory["optimizer"] == pytest.approx(whole / 2, rel=0.01)
    assert "SGD " in sgd.text() and "optimizer " in own.text()


def test_limit_decides(recipe: Path) -> None:
    report = profiled(recipe, limit=1000)
    assert not report.fits and "does not fit in 1,000 bytes free" in report.text()
    with pytest.raises(RecipeError, match="at least one"):
        measure(None, None, None, SINGLE, steps=0)  # type: ignore[arg-type]


def test_failed_allocations_name_the_part() -> None:
    with pytest.raises(MemoryLimitError, match="during backward"), _out_of_memory(10, lambda: "backward"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(MemoryLimitError, match="during forward"), _out_of_memory(10, lambda: "forward"):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="other"), _out_of_memory(10, lambda: "forward"):
        raise RuntimeError("other")


def test_durations_for_people() -> None:
    shown = [duration_text(seconds) for seconds in (0.25, 42, 150, 2 * 3600, 3 * 86400)]
    assert shown == ["0.2 s", "42 s", "2.5 min", "2.0 h", "3.0 days"]


def test_command(recipe: Path) -> None:
    command = [sys.executable, "-m", "tuner.cli.main", "profile", "--train.duration=1epochs", str(recipe)]
    small = subprocess.run(
        [*command, "--memory", "1KiB", "--steps", "1", "--json"], capture_output=True, text=True, check=False
    )
    document = json.loads(small.stdout)
    assert small.returncode == document["exit_code"] == 5 and "does not fit" in document["error"]["message"]
    assert "s a step" in small.stderr
    planned = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    assert planned.returncode == 0 and "plan" in planned.stderr
    assert not (recipe.parent / "runs").exists()
