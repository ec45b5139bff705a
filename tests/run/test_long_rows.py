"""Whole runs with inputs on the host and tiles: resumed bit for bit, the plain run's losses, and what is said."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.trainings import launch, lines, outcome
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.model import tiles
from tuner.run.options import LaunchOptions
from tuner.runtime import memory
from tuner.runtime.console import Console

LONG = {
    "train__gradient_checkpointing": "full", "train__offload_activations": "true", "train__tiled_mlp": "true",
    "train__duration": "3 steps",
}  # fmt: skip
WITHOUT_DROPOUT = {"adapter__dropout": "0"}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "LEAST", 8)


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(workplace: Path) -> None:
    whole = outcome(launch(workplace, name="whole", **LONG).run_dir)
    stopped = launch(workplace, name="parts", train__stop_after="2 steps", **LONG)
    assert stopped.status == "stopped"
    done = launch(workplace, "auto", name="parts", **LONG)
    assert outcome(done.run_dir) == whole
    assert whole["sha256"] is not None


def test_losses_are_the_plain_runs(workplace: Path) -> None:
    def losses(name: str, **flags: str) -> list[float]:
        run = launch(workplace, name=name, **WITHOUT_DROPOUT, **flags).run_dir
        return [line["loss"] for line in lines(run) if line["kind"] == "train"]

    plain = losses("plain", train__duration="3 steps")
    assert losses("long", **LONG) == pytest.approx(plain, rel=1e-6)


def test_the_start_says_what_the_host_holds(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}
    monkeypatch.setattr(Console, "say", lambda console, label, text, *rest: said.update({label: text}))
    launch(workplace, LaunchOptions(dry_run=True), schedule__warmup="50 steps", **LONG)
    assert said["plan"].endswith(" · lr up to 6e-05 of 0.001")
    assert said["warning"].startswith("schedule.warmup: 50 steps is longer than the run of 3 steps: ")
    assert said["offload"] == (
        "the inputs of recomputed layers are kept on the host: up to 4.0 MiB a process, which saves nothing on a CPU"
    )


@pytest.mark.parametrize("level", ["none", "auto"])
def test_without_recomputing_there_is_nothing_to_keep_on_the_host(level: str) -> None:
    train = {"gradient_checkpointing": level, "offload_activations": True}
    with pytest.raises(RecipeError, match="moves the inputs of recomputed layers; set train.gradient_checkpointing"):
        load_recipe({"model": {"name_or_path": "m"}, "data": {"train": "rows.jsonl"}, "train": train})


def test_routers_with_a_loss_are_refused_by_name(workplace: Path) -> None:
    flags: dict[str, Any] = {"model__router_aux_loss_coef": "0.01", **LONG}
    with pytest.raises(RecipeError, match="train.tiled_mlp: layers whose routers have a loss"):
        launch(workplace, **flags)


@pytest.mark.parametrize("has_room", [True, False])
def test_steps_keep_what_they_free_where_there_is_room(
    has_room: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(memory, "keep_freed_memory", lambda size: asked.append("keep") is None)
    monkeypatch.setattr(memory, "return_freed_memory", lambda: asked.append("return") is None)
    monkeypatch.setattr(memory, "_own_limits", lambda: [] if has_room else [1 << 20])
    launch(workplace, train__duration="2 steps")
    assert asked == (["return", "keep"] if has_room else ["return"])
