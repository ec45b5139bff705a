"""`profile --measure` measures the setup that training runs, and saves nothing but its report."""

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.export.runs import write_base
from tests.fixtures.commands import tuner
from tests.fixtures.trainings import overrides
from tuner.config.load import load_recipe
from tuner.data.building.prepare import prepare
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile import measure as measuring
from tuner.profile.measure import TIMES, Measurement, MeasureOptions, duration_text, measure
from tuner.run.measure import MEASURED, Measured, measure_recipe
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import resolve
from tuner.train.guard import GuardLimits

SINGLE = RankInfo(0, 1, 0, 1)


def write_recipe(directory: Path) -> Path:
    """Forty chats, a tiny model and a recipe of both; returns the recipe."""
    write_base(directory / "base", "qwen3")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{6 + i} w{7 + i}"},
                {"role": "assistant", "content": f"w{20 + i}"},
            ]
        }
        for i in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "r.yaml").write_text(
        "version: 1\nmodel: {name_or_path: base}\ndata: {train: rows.jsonl, max_length: 32}\n"
        "train: {duration: 2 epochs, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}\n"
    )
    return directory / "r.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that tests measure and change nothing of."""
    return write_recipe(tmp_path_factory.mktemp("measured"))


@pytest.fixture(scope="module")
def once(shared: Path) -> Callable[..., Measurement]:
    """Measures the shared recipe with these flags, for all tests that look at it once."""
    return cache(lambda **flags: measured(shared, **flags))


def measured(recipe: Path, limit: int | None = None, output: Path | None = None, **flags: str) -> Measurement:
    wish = load_recipe(recipe, overrides(flags)).recipe
    request = prepare_spec(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    prepared = open_prepared(prepare(request).path)
    resolved = resolve(wish, request.max_length, SINGLE)
    return measure(resolved, prepared, request.tokenizer, SINGLE, MeasureOptions(2, limit, output))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer's own
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_parts_are_those_of_the_model(shared: Path, once: Callable[..., Measurement], adapter: str) -> None:
    report = once() if adapter == "none" else once(adapter__kind=adapter)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(shared.parent / "base", dtype=torch.float32)
    buffers = sum(b.numel() * b.element_size() for b in base.buffers())
    size = sum(p.numel() * 4 for p in base.parameters())
    tensors, guard = len(list(base.parameters())), 8 * (2 * GuardLimits().window + 2)
    parts, memory = report.memory.parts, report.memory
    if adapter == "none":
        assert parts["parameters"] == size + buffers
        assert parts["optimizer"] == 2 * size + 4 * tensors + guard
        assert max(memory.series["gradients"]) == size
    else:
        added = parts["parameters"] - size - buffers
        assert 0 < added < size * 2
        assert 0 <= parts["optimizer"] - 2 * added - guard < 4 * 100
        assert max(memory.series["gradients"]) == added
    assert parts["activations"] > 0
    assert sum(parts.values()) == memory.peak_bytes == max(memory.phases.values())
    assert sum(holding.bytes for holding in memory.largest) == memory.peak_bytes
    assert [phase for phase, _ in memory.marks] == ["forward", "backward"] * 2 + ["optimizer"]
    assert report.fits and report.text().startswith("peak ") and "fits in" in report.text()
    assert not (shared.parent / "runs").exists()


def test_activations_are_found_in_the_modules_that_made_them(once: Callable[..., Measurement]) -> None:
    plain, again = once(), once(train__gradient_checkpointing="full")
    kept = {one.owner: one.bytes for one in plain.memory.largest if one.part == "activations"}
    assert kept["model.layers.0.mlp.gate_proj"] > 0
    assert again.memory.phases["forward"] < plain.memory.phases["forward"]
    most = [max(found.memory.series["activations"]) for found in (plain, again)]
    assert 0 < most[1] < most[0]  # made again, in the backward pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_are_recorded_as_they_train(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's choice of what waits for the backward pass, and compiled once."""
    monkeypatch.setattr("tuner.model.blocks.BACKEND", "aot_eager_decomp_partition")
    graphs: list[int] = []
    whole = measuring._timed_steps

    def counting(*given: Any) -> Any:
        graphs.append(counters["stats"]["unique_graphs"])
        result = whole(*given)
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    monkeypatch.setattr(measuring, "_timed_steps", counting)
    counters.clear()  # of the compiler, process-wide
    torch_alone = {"model__kernels": "torch"}
    plain, compiled = measured(recipe, **torch_alone), measured(recipe, train__compile="true", **torch_alone)
    owners = {one.owner for one in compiled.memory.largest if one.part == "activations"}
    assert {"model.layers.0", "model.layers.1"} <= owners and not any("mlp" in owner for owner in owners)
    assert graphs[0] == graphs[1] == 0 < graphs[2] == graphs[3]
    kept = [max(found.memory.series["activations"]) for found in (plain, compiled)]
    assert 0 < kept[1] < kept[0]


def test_the_recorded_step_computes_with_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed eagerly they keep more, and a recipe that fits would not."""
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    layer: Any = torch.compile(torch.nn.ReLU(), backend=backend)
    memory = SimpleNamespace(memory=lambda: "recorded")
    monkeypatch.setattr(measuring, "StepRecorder", lambda *given, **options: nullcontext(memory))
    monkeypatch.setattr(measuring, "_take", lambda *given: layer(torch.ones(1) + 1))
    optimizer = SimpleNamespace(allocate=lambda: None, set_step_count=lambda count: None)
    root = SimpleNamespace(parts=SimpleNamespace(padding=None))
    train_state = SimpleNamespace(optimizer=optimizer, root=root)
    batches = SimpleNamespace(step=lambda index: None)
    assembly: Any = SimpleNamespace(train_state=train_state, batches=batches)
    assert measuring._recorded_step(assembly, 0, None) == "recorded"
    assert len(made) == 1


def test_rates(once: Callable[..., Measurement]) -> None:
    report = once()
    rates = report.rates
    assert report.step_s == pytest.approx(sum(report.times.values())) and set(report.times) == set(TIMES)
    assert all(seconds > 0 for seconds in report.times.values())
    assert rates["tok_per_s"] == pytest.approx(report.tokens_per_step / report.step_s)
    assert rates["trained_per_s"] < rates["tok_per_s"] and 0 < rates["data_wait"] < 1
    assert rates["mfu"] == pytest.approx(report.flops / report.step_s / report.peak_flops)
    assert "MFU" in report.time_text() and "datasheet" not in report.time_text()
    assert report.communication_s == 0
    plain = MEASURED.dump_python(Measured(1, report), mode="json")
    passed_on = MEASURED.validate_python(json.loads(json.dumps(plain))).found
    assert passed_on is not None
    assert json.dumps(passed_on.as_json()) == json.dumps(report.as_json())


def test_state_of_other_optimizers_is_counted_under_their_names(
    once: Callable[..., Measurement], tmp_path: Path
) -> None:
    """Momentum is one number a weight; one of the user's own allocates it in its first step."""
    (tmp_path / "own.py").write_text("from torch.optim import SGD\n")
    whole = once().memory.parts["optimizer"]
    sgd = once(optimizer__kind="sgd", optimizer__lr="0.1")
    flags = {"optimizer__use": f"{tmp_path}/own.py:SGD", "optimizer__options": "{momentum: 0.9}"}
    own = once(optimizer__kind="custom", optimizer__lr="0.1", **flags)
    assert sgd.memory.parts["optimizer"] == own.memory.parts["optimizer"] == pytest.approx(whole / 2, rel=0.02)
    assert "optimizer " in sgd.text() and "optimizer " in own.text()


@pytest.mark.slow
def test_a_cap_on_counted_bytes_is_examined_where_it_is_passed(shared: Path, once: Callable[..., Measurement]) -> None:
    once()  # the first of a process holds a little besides
    report = measured(shared)
    cap = report.memory.peak_bytes - 1
    assert report.shortage is None
    capped = measured(shared, limit=cap)
    short = capped.shortage
    assert short is not None and not capped.fits and capped.memory.peak_bytes == cap + 1
    assert short.line().startswith("out of memory in the step with the longest row, judged against")
    assert "activations of model.layers.*.self_attn (2 of them) " in short.line()
    assert short.held_bytes == sum(short.parts.values()) > cap
    assert short.overrides == {"train.micro_batch_size": "1"}
    assert short.hint().startswith("--train.micro_batch_size 1 fits")
    passed_on = MEASURED.validate_python(MEASURED.dump_python(Measured(1, capped), mode="json")).found
    assert passed_on is not None and passed_on.shortage == short
    assert measured(shared, limit=cap, train__micro_batch_size="1").fits
    none = measured(shared, limit=1000).shortage
    assert none is not None and "optimizer of model.layers.*.mlp" in none.line()
    assert "take a device with more memory" in none.hint()
    with pytest.raises(RecipeError, match="at least one"):
        measure(None, None, None, SINGLE, MeasureOptions(0))  # type: ignore[arg-type]


@pytest.mark.slow
def test_failed_allocations_are_examined(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measuring._timed_steps

    def failing(*given: object) -> object:
        torch.empty(2**60, dtype=torch.uint8)
        return whole(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "_timed_steps", failing)
    with pytest.raises(MemoryLimitError, match=r"longest row, .*1073741824.00 GiB requested"):
        measured(recipe)
    monkeypatch.setattr(measuring, "build", lambda *given: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(MemoryLimitError, match="while the model is built"):
        measured(recipe)


def test_durations_for_people() -> None:
    shown = [duration_text(seconds) for seconds in (0.0251, 0.25, 42, 150, 2 * 3600, 3 * 86400)]
    assert shown == ["25.1 ms", "0.2 s", "42 s", "2.5 min", "2.0 h", "3.0 days"]


def test_command(recipe: Path) -> None:
    output, where = recipe.parent / "out", recipe.parent
    words = ("profile", "--train.duration=1epochs", str(recipe), "--measure", "1", "--output", str(output), "--json")
    done = tuner(*words, cwd=where)
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["metrics"]["memory"]["peak_bytes"] == sum(document["metrics"]["memory"]["parts"].values())
    assert {name: Path(path).name for name, path in document["artifacts"].items() if name != "text"} == {
        "report": "report.html", "figures": "report.json", "trace": "trace-rank0.json.gz",
    }  # fmt: skip
    trace = json.loads(gzip.decompress((output / "trace-rank0.json.gz").read_bytes()))
    assert {f"tuner.{part}" for part in TIMES} <= {event.get("name") for event in trace["traceEvents"]}
    assert "s/step" in done.stderr and "at the peak" in done.stderr
    assert not (recipe.parent / "runs").exists()
    small = tuner(*words, "--memory", "1KiB", cwd=where)
    document = json.loads(small.stdout)
    assert small.returncode == document["exit_code"] == 5
    assert "judged against 1,024 bytes" in document["error"]["message"]
    assert json.loads((output / "report.json").read_text())["verdict"] == "does not fit"
    assert measure_recipe(load_recipe(recipe), MeasureOptions(1, dry_run=True), "error") == Measured(4, None)
