"""Optimizers of the user's own: what they are given, that they go on exactly, and how mistakes are answered."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.contracts.syntax import ROOT
from tests.fixtures import tables, trainings
from tests.fixtures.processes import fake_group
from tests.fixtures.trainings import launch, lines
from tuner.config.load import Override, load_recipe
from tuner.config.optimizers import Optimizer
from tuner.errors import PluginError, RecipeError
from tuner.parallel.layouts import ShardLayout, layouts_of
from tuner.run.options import LaunchOptions
from tuner.run.trial import try_optimizer
from tuner.train.custom_optimizer import build_own_optimizer
from tuner.train.optimizer import build_optimizer

CODE = Path(__file__).with_name("own_optimizers.py").read_text(encoding="utf-8")
SECTIONS: TypeAdapter[Any] = TypeAdapter(Optimizer)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace that is copied."""
    directory = tmp_path_factory.mktemp("prepared")
    trainings.prepare(directory, 1, layers=1)
    (directory / "own.py").write_text(CODE)
    return directory


def section(directory: Path, name: str, **values: Any) -> Any:
    return SECTIONS.validate_python({"kind": "custom", "use": f"{directory}/own.py:{name}", "lr": 0.1, **values})


def tried(directory: Path, name: str, **values: Any) -> None:
    (directory / "own.py").write_text(CODE)
    try_optimizer(section(directory, name, **values))


def test_torchs_adamw_by_file_is_ours_with_its_groups(workplace: Path) -> None:
    common = {"train__stop_after": "4 steps", "optimizer__lr": "1e-3", "optimizer__weight_decay": "0.1"}
    common |= {"optimizer__groups": "[{match: q_proj, lr: 1e-2, weight_decay: 0}]"}
    ours = lines(launch(workplace, name="ours", **common).run_dir)
    own = {"optimizer__kind": "custom", "optimizer__use": "own.py:AdamW"}
    options = "{betas: [0.9, 0.95], eps: 1e-8}"
    theirs = lines(launch(workplace, name="theirs", **common, **own, optimizer__options=options).run_dir)
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert (a["lr"], b["grad_norm"]) == (b["lr"], pytest.approx(a["grad_norm"], rel=1e-4))


@pytest.mark.parametrize(
    "name", [pytest.param("Lion", marks=pytest.mark.slow), "Counts", pytest.param("NAdam", marks=pytest.mark.slow)]
)
def test_stopped_and_resumed_is_the_unbroken_run(workplace: Path, name: str) -> None:
    flags = {"optimizer__kind": "custom", "optimizer__use": f"own.py:{name}", "optimizer__weight_decay": "0.1"}
    flags |= {"train__duration": "5 steps"}
    whole = launch(workplace, name="whole", **flags)
    launch(workplace, train__stop_after="3 steps", **flags)
    again = launch(workplace, LaunchOptions(resume="auto"), **flags)
    assert (again.status, again.step) == ("finished", whole.step)
    assert trainings.outcome(again.run_dir) == trainings.outcome(whole.run_dir)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "AdamW", "Adagrad", "Adafactor", "Counts"])
def test_torchs_own_pass_the_trial(tmp_path: Path, name: str) -> None:
    tried(tmp_path, name, options={"momentum": 0.9} if name in {"SGD", "RMSprop"} else {})


@pytest.mark.parametrize(("name", "said"), tables.cases(__file__, "mistakes_are_named_before_anything_is_prepared"))
def test_mistakes_are_named_before_anything_is_prepared(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        tried(tmp_path, name)
    assert re.search(said, f"{caught.value.message} {caught.value.hint}"), caught.value.message


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no option beta"):
        tried(tmp_path, "Lion", options={"beta": 1})
    with pytest.raises(ValueError, match="lr among the options; write optimizer.lr"):
        tried(tmp_path, "Lion", options={"lr": 1})


def test_a_mistake_costs_no_preparation(workplace: Path) -> None:
    with pytest.raises(PluginError, match="does not resume exactly"):
        launch(workplace, optimizer__kind="custom", optimizer__use="own.py:Hidden")
    assert not (workplace / "runs").exists()


def test_only_elementwise_ones_may_be_sharded(tmp_path: Path) -> None:
    tried(tmp_path, "Lion", elementwise=True)
    with pytest.raises(PluginError, match="updates a part of a parameter differently from the whole"):
        tried(tmp_path, "Norms", elementwise=True)
    tried(tmp_path, "Norms")
    parameter = nn.Parameter(torch.zeros(2, 2))
    groups = [{"params": [parameter], "names": ("w",), "lr": 0.1, "weight_decay": 0.0}]
    sharded: Any = {parameter: ShardLayout(torch.Size((4, 2)), (), object())}  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="parts of sharded parameters"):
        build_own_optimizer(section(tmp_path, "Norms"), groups, sharded)
    built = build_own_optimizer(section(tmp_path, "Lion", elementwise=True), groups, sharded)
    parameter.grad = torch.ones(2, 2)
    built.step()
    assert built.state[parameter]["exp_avg"].shape == (2, 2)
    built.state[parameter]["mean"] = torch.zeros(2)
    with pytest.raises(PluginError, match="keeps mean in another shape"):
        _ = built.state


def test_rates_of_its_own_groups_follow_the_schedule(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    parameters = {"norm.weight": nn.Parameter(torch.zeros(2)), "up.weight": nn.Parameter(torch.zeros(2, 2))}
    updater = build_optimizer(section(tmp_path, "split", options={"share": 0.5}), parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    updater.set_factor(0.5)
    updater.step(torch.tensor(True))
    assert not any(parameter.any() for parameter in parameters.values())
    updater.step(torch.tensor(False), torch.tensor(2.0))
    assert parameters["norm.weight"].tolist() == pytest.approx([-0.0125] * 2)
    assert parameters["up.weight"][0].tolist() == pytest.approx([-0.025] * 2)


def test_the_optimizer_in_the_docs_trains(workplace: Path) -> None:
    text = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    code, schedule = (block.split("```")[0] for block in text.split("```python\n")[1:3])
    (workplace / "my_optimizer.py").write_text(code)
    (workplace / "my_schedule.py").write_text(schedule)
    recipe = next(block.split("```")[0] for block in text.split("```yaml\n") if "my_optimizer.py" in block)
    (workplace / "r.yaml").write_text((workplace / "r.yaml").read_text().replace("optimizer: {lr: 1e-3}\n", recipe))
    overrides = [Override("train.stop_after", "3 steps")]
    assert load_recipe(workplace / "r.yaml", overrides, cwd=workplace).recipe.optimizer.kind == "custom"
    found = lines(launch(workplace, train__stop_after="3 steps").run_dir)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert len({line["lr"] for line in found}) == 3


def test_a_shard_that_one_process_holds_alone_is_whole() -> None:
    with fake_group(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        found = layouts_of([distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])])
        assert found == [ShardLayout(torch.Size((4, 2)))]
