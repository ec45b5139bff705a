"""Runs by name: what an argument stands for, and what is said where it stands for nothing."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from tests.rundir import made
from tuner.cli.named import HUB_SECONDS, model_name, run_or_hub, run_path
from tuner.errors import RecipeError
from tuner.rundir.model_path import HubModel


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the runs `l` and `m` under runs/, and a recipe of each of `m` and `later`."""
    for name in ("l", "m"):
        made.run(tmp_path / "runs" / name)
    for name in ("m", "later"):
        (tmp_path / f"{name}.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_a_run_under_runs_and_a_path_wins(place: Path) -> None:
    assert run_path("l") == place / "runs" / "l" == run_path("runs/l") == run_path(place / "runs" / "l")
    assert model_name("l") == str(place / "runs" / "l")
    (place / "l").mkdir()
    assert run_path("l") == place / "runs" / "l" != run_path("l", others=True) == place / "l"
    (place / "l").rmdir()
    made.run(place / "l")
    assert run_path("l") == place / "l"
    assert model_name("l") == str(place / "l")


def test_a_recipe_stands_for_its_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_path("m.yaml") == place / "runs" / "m"
    assert "m.yaml trains" in capsys.readouterr().err
    made.run(place / "elsewhere")
    (place / "away.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\noutput_dir: elsewhere\n")
    assert run_path("away") == place / "elsewhere"
    with pytest.raises(RecipeError, match="is a recipe, and its run has not begun") as refused:
        run_path("later.yaml")
    assert refused.value.hint == f"begin it: tuner train {place / 'later.yaml'}"


def test_an_export_next_to_a_recipe_hides_no_run(place: Path) -> None:
    for name in ("m", "later"):
        (place / name).mkdir()
        (place / name / "config.json").write_text("{}")
    (place / "runs" / "m").rename(place / "runs" / "n")
    (place / "m.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\noutput_dir: runs/n\n")
    assert run_path("m") == place / "runs" / "n"
    assert run_path("m", others=True) == run_path("m", recipes=False) == place / "m"
    assert run_path("later") == place / "later"  # its run has not begun


def test_what_is_nothing_is_answered_with_the_runs_that_there_are(place: Path) -> None:
    with pytest.raises(RecipeError, match=r"^nothing\.gguf: no such file$"):
        run_or_hub("nothing.gguf")
    with pytest.raises(RecipeError, match="nothing: no such directory, and no run of that name in ./runs") as refused:
        run_path("nothing")
    assert refused.value.hint == "there are: l, m (tuner runs list)"


def test_a_recipe_names_no_run_to_remove(place: Path) -> None:
    assert run_path("m.yaml", recipes=False) == place / "m.yaml"
    with pytest.raises(RecipeError, match="no such directory"):
        run_path("later", recipes=False)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionError("down"), "the hub cannot be reached"),
        (HFValidationError(""), "the hub has none of that name"),
        (OfflineModeIsEnabled(""), "the hub cannot be reached"),
    ],
)
def test_a_name_that_is_no_run_and_not_on_the_hub_is_said_at_once(
    error: Exception, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(api: object, name: str, timeout: float) -> None:
        assert (name, timeout) == ("nope", HUB_SECONDS)
        raise error

    made.run(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    with pytest.raises(RecipeError, match=f"nope: no such directory, and no run of that name .*and {why}") as refused:
        model_name("nope")
    assert refused.value.hint == "there are: first (tuner runs list)"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert model_name("nope") == "nope"
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name, timeout: None)
    assert model_name("nope") == "nope"


def test_a_path_that_is_not_there_is_no_name_of_the_hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_or_hub("l") == place / "runs" / "l"
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name, timeout: None)
    assert run_or_hub("owner/name") == HubModel("owner/name")
    for text in ("./name", "later.yaml"):  # a directory and a recipe are no names of the hub
        with pytest.raises(RecipeError) as refused:
            run_or_hub(text)
        assert "hub" not in refused.value.message
