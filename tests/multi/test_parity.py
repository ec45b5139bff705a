"""However many processes, shards, replicas, micro-batches and documents to a row: the same loss and gradients."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.multi.launcher import run_cases
from tests.train.synthetic import SyntheticRows, write_model
from tuner.data.batches import GlobalBatches

UNITS = 3  # two blocks and the root
ADAPTERS: dict[str, dict[str, Any]] = {"full": {"kind": "none"}, "lora": {"kind": "lora", "r": 4}}
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ONE, CASES, LAUNCHES = TABLE["one"], TABLE["cases"], TABLE["launches"]
# Trained tokens of each row. Of the second global batch of 8 rows, the first two of four processes have none; the
# third batch is partial.
TRAINED: list[int] = ONE["trained"]
SHORT = {"train.duration": "4 steps"}
# Whole runs, of which the collectives are counted; of 8 rows a step.
WHOLE: dict[str, dict[str, Any]] = {
    f"run: {name}": {**at, "flags": {**SHORT, "train.micro_batch_size": str(micro), "parallel.shard": shard}}
    for name, at, micro, shard in (
        ("two", {"world": 2, "local": 2}, 4, "full"), ("two, 4 micro-batches", {"world": 2, "local": 2}, 1, "full"),
        ("four", {"world": 4, "local": 4}, 2, "full"), ("four, 2 micro-batches", {"world": 4, "local": 4}, 1, "full"),
        ("2 x 2", {"world": 4, "local": 2}, 2, "hybrid"),
        ("2 x 2, 2 micro-batches", {"world": 4, "local": 2}, 1, "hybrid"),
    )
}
FLAGS = {
    "train.duration": "5 steps", "checkpoint.at_end": "false", "checkpoint.every": "never", "parallel.processes": "auto"
}  # fmt: skip
if "TUNER_TEST_EVERY_ROW" not in os.environ:
    CASES, WHOLE = (
        {name: case for name, case in all_of.items() if name not in TABLE["mixed"]} for all_of in (CASES, WHOLE)
    )
OVERFLOW = "fp16: two, an overflow on one"
ALIKE = [(name, name.partition(": ")[0] + ": one" if ": " in name else "one") for name in CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases gave; the worker that runs them all is started once."""
    directory = tmp_path_factory.mktemp("parity")
    write_model(directory)
    write_model(directory / "large", "llama", 200)  # its rows are looked up in shards, if 2 x 2 x 32 tokens are less
    write_model(directory / "hybrid", "falcon-h1")
    cases = []
    for name, changes in CASES.items():
        case = {**ONE, **changes, "name": name}
        case["model"] = str(directory / case["model"])
        cases.append({**case, "adapter": ADAPTERS[case["adapter"]]})
    trainings.prepare(directory, 1)
    recipe = directory / "r.yaml"
    lines = recipe.read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if not line.startswith("adapter")))
    for number, (name, changes) in enumerate((WHOLE | LAUNCHES).items()):
        flags = {**FLAGS, "name": f"run{number}", **changes["flags"]}
        cases.append({**changes, "name": name, "recipe": str(recipe), "flags": flags})
    run_cases(cases, directory)
    return directory


def facts(found: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((found / f"{name}.json").read_text())
    return read


def gradients(found: Path, name: str, step: int) -> torch.Tensor:
    """All gradients of a step as one vector: those of the loss, where the backward pass scaled it."""
    tensors = load_file(found / f"{name}.safetensors")
    scale = facts(found, name)["figures"][step].get("loss_scale", 1.0)
    return torch.cat([tensors[key].flatten() for key in sorted(tensors) if key.startswith(f"{step}.")]) / scale


def largest_relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.multi
@pytest.mark.parametrize(("name", "like"), [pair for pair in ALIKE if pair[0] not in (pair[1], OVERFLOW)])
def test_the_same_loss_and_gradients(found: Path, name: str, like: str) -> None:
    one, other = facts(found, like), facts(found, name)
    bf16 = name.startswith(("bf16", "fp16", "fp8"))
    assert largest_relative(one["loss"], other["loss"]) <= 1e-5
    assert largest_relative(one["grad_norm"], other["grad_norm"]) <= (1e-4 if bf16 else 1e-5)
    if name.startswith("trained"):
        assert one["loss"][0] != one["loss"][3], "the weights must have moved"
        return
    for step, norm in enumerate(one["grad_norm"]):
        expected, got = gradients(found, like, step), gradients(found, name, step)
        assert expected.norm().item() == pytest.approx(norm, rel=1e-5)
        # In bf16 the gradient of a sum is rounded in another order; its norm is compared above.
        assert (got - expected).norm() <= (1e-2 if bf16 else 1e-5) * expected.norm(), step


@pytest.mark.multi
def test_gradients_that_overflow_on_one_rank_leave_out_the_update_of_all(found: Path) -> None:
    one, other = facts(found, "fp16: one"), facts(found, OVERFLOW)
    assert [figures["loss_scale"] for figures in other["figures"]] == [65536.0, 65536.0, 32768.0]
    assert other["skipped"] == [False, True, False] and one["skipped"] == [False] * 3
    assert largest_relative(one["loss"], other["loss"]) <= 1e-5, "the forward pass is not touched"
    assert largest_relative(one["grad_norm"][::2], other["grad_norm"][::2]) <= 1e-4, "it is that of all shards"
    for step in (0, 2):
        expected, got = gradients(found, "fp16: one", step), gradients(found, OVERFLOW, step)
        assert (got - expected).norm() <= 1e-2 * expected.norm(), step
    assert other["collectives"] == facts(found, "bf16: two")["collectives"], "they agree in no collective of its own"


@pytest.mark.multi
@pytest.mark.parametrize(("name", "case"), WHOLE.items())
def test_a_step_of_a_run_talks_no_more_than_fsdp_does(found: Path, name: str, case: dict[str, Any]) -> None:
    """Beyond FSDP's own: one sum of gradient norm and loss, and one flag. Replicas are added up once a step."""
    micro_batches = 8 // case["world"] // int(case["flags"]["train.micro_batch_size"])
    replicated = UNITS if case["flags"]["parallel.shard"] == "hybrid" else 0
    assert facts(found, name)["collectives"] == {
        "allgather_base": micro_batches * (2 * UNITS - 1),  # the root's weights stay until its backward pass
        "reduce_scatter_base": micro_batches * UNITS,
        "allreduce": replicated + 2,
    }


@pytest.mark.multi
def test_an_embedding_that_is_looked_up_in_is_never_gathered(found: Path) -> None:
    """Its ids and the gradients of its rows are, and its rows summed; once a step its gradient over the copies."""
    blocks, ends, looked_up = 2, 2, 1  # the output layer is a unit too
    assert facts(found, "rows: 2 x 2, 2 micro-batches")["collectives"] == {
        "allgather_base": 2 * (2 * blocks + ends + 2 * looked_up),
        "reduce_scatter_base": 2 * (blocks + ends + looked_up),
        "allreduce": blocks + ends + looked_up + 1,
    }


@pytest.mark.multi
def test_weights_that_are_kept_are_gathered_once_a_micro_batch(found: Path) -> None:
    assert facts(found, "two, 4 micro-batches, gathered once")["collectives"] == {
        "allgather_base": 4 * UNITS, "reduce_scatter_base": 4 * UNITS, "allreduce": 1,
    }  # fmt: skip


@pytest.mark.multi
def test_tiles_and_inputs_on_the_host_gather_nothing_more(found: Path) -> None:
    plain, long = (facts(found, f"two, full, 2 micro-batches{name}")["collectives"] for name in ("", ", long"))
    assert plain == long


@pytest.mark.multi
@pytest.mark.parametrize(
    ("name", "micro_batches", "replicated"),
    [
        (name, count, replicated)
        for name, count, replicated in (("two, 4 micro-batches", 4, 0), ("2 x 2, 2 micro-batches", 2, UNITS))
        if f"{name}, whole" in CASES
    ],
)
def test_whole_gradients_are_reduced_once_a_step(found: Path, name: str, micro_batches: int, replicated: int) -> None:
    whole, sharded = (facts(found, each)["collectives"] for each in (f"{name}, whole", name))
    assert (whole["reduce_scatter_base"], whole["allreduce"]) == (UNITS, replicated + 1)
    assert (sharded["reduce_scatter_base"], sharded["allreduce"]) == (micro_batches * UNITS, replicated + 1)


@pytest.mark.multi
def test_a_run_goes_on_with_other_processes_and_other_shards(found: Path) -> None:
    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (found / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    assert [facts(found, name)["step"] for name in LAUNCHES] == [2, 4, 5, 5, 0]
    parts, whole = lines("parts"), lines("unbroken")
    assert [line["step"] for line in parts] == [1, 2, 3, 4, 5]
    for figure in ("loss", "grad_norm"):
        assert largest_relative([line[figure] for line in whole], [line[figure] for line in parts]) <= 1e-5
    assert whole[0]["loss"] != whole[-1]["loss"], "the weights must have moved"


@pytest.mark.multi
def test_a_signal_to_one_rank_in_an_evaluation_stops_all(found: Path) -> None:
    assert facts(found, "launch: signalled")["status"] == "stopped"
    assert (found / "runs" / "signalled" / "checkpoints" / "step-0").is_dir()


def test_the_rows_leave_ranks_without_trained_tokens() -> None:
    rows: Any = SyntheticRows(TRAINED)
    shares = [
        GlobalBatches(
            rows, seed=0, shuffle=False, global_batch_size=8, micro_batch_size=2, rank=rank, world_size=4
        ).step(1)
        for rank in range(4)
    ]
    counts = [sum(len(batch.trained_positions) for batch in share.micro) for share in shares]
    assert counts == [0, 0, 27, 27]
