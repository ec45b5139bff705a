"""Activations and gradients of chosen modules: what is written is what autograd says, and the run has the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.model.outputs import first_tensor

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
