"""Checks and figures inside of a run, and activations and gradients of chosen modules: what is written is what autograd
says, nothing of the run's bits moves, and a damaged state replaces no good checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.checkpoint.manifest import step_dirs
from tuner.config.load import load_recipe
from tuner.errors import ExitCode, MachineError, RecipeError, VerificationError
from tuner.model.outputs import first_tensor
from tuner.parallel.health import KnownProducts
from tuner.run.tasks.health import RankTime, slow_ranks
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


SHORT = {"train__duration": "3 steps", "checkpoint__every": "never", "model__kernels": "torch"}
FILE = "prober/step-1/rank-0.safetensors"
PROBED = {"prober__steps": "[1, 3]", "prober__modules": "[embed_tokens, layers.1.mlp, layers.0.input_layernorm]"}


@pytest.fixture
def place(workplace: Path) -> Path:
    """Two layers, all of whose weights are trained."""
    return trainings.in_full(trainings.emptied(workplace, layers=2))


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_what_is_written_fits_together_and_changes_nothing(place: Path, recomputed: str) -> None:
    keys = SHORT | {"train__gradient_checkpointing": recomputed}
    plain = launch(place, **keys, name="plain")
    run = launch(place, **keys, **PROBED).run_dir
    assert trainings.outcome(run) == trainings.outcome(plain.run_dir)
    assert sorted(path.name for path in (run / "prober").iterdir()) == ["step-1", "step-3"]
    file = run / "prober" / "step-3" / "rank-0.safetensors"
    found = load_file(file)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"step": "3", "rank": "0", "processes": "1"}
    micros = {name.split("/")[0] for name in found if name.startswith("micro-")}
    assert micros == {f"micro-{number}" for number in range(2)}, "8 rows, 4 at a time"
    down = "model.layers.1.mlp.down_proj"
    total = torch.zeros(())
    for micro in sorted(micros):
        # The down projection is y = W h: the gradient of W is the sum of outer products of its output's and its input.
        mlp = f"{micro}/model.layers.1.mlp"
        hidden = found[f"{mlp}.act_fn/output"] * found[f"{mlp}.up_proj/output"]
        of_output = found[f"{micro}/{down}/output_grad"]
        assert torch.equal(of_output, found[f"{micro}/model.layers.1.mlp/output_grad"])
        total = total + of_output.flatten(0, -2).T @ hidden.flatten(0, -2)
    torch.testing.assert_close(total, found[f"gradients/{down}.weight"], rtol=1e-4, atol=1e-6)
    assert "gradients/model.embed_tokens.weight" in found and "gradients/model.layers.0.input_layernorm.weight" in found
    assert not any("layers.0.mlp" in name or name.endswith(".1") for name in found), "nothing is counted twice"


def test_outputs_alone(place: Path) -> None:
    run = launch(place, **SHORT, **PROBED, prober__gradients="false", train__stop_after="1 step").run_dir
    names = load_file(run / "prober" / "step-1" / "rank-0.safetensors")
    assert names and all(name.endswith("/output") for name in names)


def test_the_first_rows_of_gradients(place: Path) -> None:
    every, first = (
        load_file(launch(place, **{**SHORT, **PROBED, **keys, "train__stop_after": "1 step"}).run_dir / FILE)
        for keys in ({"name": "every"}, {"name": "first", "prober__first_rows": "3"})
    )
    assert every.keys() == first.keys()
    for name, gradient in every.items():
        kept = gradient[:3] if name.startswith("gradients/") else gradient
        assert torch.equal(first[name], kept), name


def test_two_runs_are_compared_by_what_they_wrote(place: Path) -> None:
    """A planted difference in one weight shows first in the module that has it."""
    keys = SHORT | {"prober__steps": "[1]", "prober__modules": "[layers]", "train__stop_after": "1 step"}
    one = launch(place, **keys).run_dir
    weights = load_file(place / "model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})
    two = launch(place, **keys, name="other").run_dir
    here, there = (load_file(run / "prober" / "step-1" / "rank-0.safetensors") for run in (one, two))
    assert here.keys() == there.keys()
    differing = {name.split("/")[1] for name in here if name.endswith("/output") and not here[name].equal(there[name])}
    apart = {name for name in differing if "layers.0" not in name}
    assert differing == apart and "model.layers.1.mlp.up_proj" in apart and "model.layers.1.self_attn" not in apart


@pytest.mark.parametrize(
    ("prober", "said"),
    [
        ({"steps": [1]}, "name the modules to look into, such as [embed_tokens, layers.0.mlp]"),
        ({"modules": ["mlp"]}, "say in which steps to look into them: prober.steps, such as [1]"),
    ],
)
def test_half_a_wish_is_refused(prober: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "prober": prober})
    assert said in str(caught.value)


def test_a_module_that_is_not_there_is_named_with_the_nearest(place: Path) -> None:
    with pytest.raises(RecipeError, match="prober.modules: 'layers.0.mpl' matches nothing in this model"):
        launch(place, **SHORT, prober__steps="[1]", prober__modules="[layers.0.mpl]")


def test_the_first_tensor_of_an_output() -> None:
    tensor = torch.ones(2)
    assert first_tensor((None, tensor)) is tensor and first_tensor({"a": tensor}) is tensor
    assert first_tensor(torch.ones(2, dtype=torch.int64)) is None and first_tensor(None) is None
