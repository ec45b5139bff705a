"""The proof at the start is kept by what it depends on: code and shapes, and not the values of weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.cli.main import main
from tuner.runtime.files import read_json
from tuner.setup import model, proven


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainings.prepare(tmp_path_factory.mktemp("made"), 1)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each proof that is made; none was made before by this process."""
    made: list[str] = []
    real: Callable[..., Any] = model.prove_route

    def noted(root: Any, *given: Any) -> Any:
        made.append(type(root.model).__name__)
        return real(root, *given)

    monkeypatch.setattr(model, "prove_route", noted)
    monkeypatch.setattr(proven, "_known", {})
    return made


def started(directory: Path, name: str, cache: Path, **flags: str) -> None:
    launch(directory, name=name, train__duration="1 steps", data__cache_dir=str(cache), **flags)


def test_it_is_made_once_and_found_by_other_processes(
    made: Path, proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(made, "a", tmp_path)
    started(made, "b", tmp_path, seed="7", optimizer__lr="1e-5")
    assert len(proofs) == 1
    (kept,) = (tmp_path / "proofs").iterdir()
    assert read_json(kept)["verdict"] == {"route": "flat", "why_apart": None}
    monkeypatch.setattr(proven, "_known", {})  # as another process
    started(made, "c", tmp_path)
    assert len(proofs) == 1
    monkeypatch.setattr(proven, "_known", {})
    kept.write_text("{")  # damaged: made again, and kept again
    started(made, "d", tmp_path)
    assert len(proofs) == 2 and read_json(kept)["verdict"]["route"] == "flat"


@pytest.mark.slow("adapter__r", "model__kernels", "train__tiled_mlp", "data__max_length",
                  "model__config__rms_norm_eps")  # fmt: skip
@pytest.mark.parametrize(
    "flags",
    [
        {"adapter__r": "3"}, {"adapter__kind": "dora"}, {"data__max_length": "32"},
        {"model__kernels": "torch"}, {"train__tiled_mlp": "true"}, {"model__config__rms_norm_eps": "1e-3"},
        {"data__packing": "auto"},
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_it_depends_on_asks_for_another(
    made: Path, proofs: list[str], tmp_path: Path, flags: dict[str, str]
) -> None:
    for number, own in enumerate(({}, flags)):
        name = f"{number}-{'-'.join(flags.values())}".replace(".", "")
        started(made, name, tmp_path, **{"model__kernels": "native", **own})
    assert len(proofs) == 2


def test_the_code_of_a_model_and_the_versions_are_part_of_it(
    made: Path, proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(made, "first", tmp_path)
    monkeypatch.setattr(proven, "versions", lambda: {"transformers": "0"})
    started(made, "versions", tmp_path)
    monkeypatch.setattr(proven, "source_hash", lambda parts: "other")
    started(made, "code", tmp_path)
    assert len(proofs) == 3


def test_the_whole_model_is_proven_with_its_weights_where_that_is_asked_for(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    with pytest.raises(SystemExit) as ended:
        main(["prove", "r.yaml", "--weights", "--json"])
    assert ended.value.code == 0
    found = json.loads(capfd.readouterr().out)["metrics"]
    assert found["route"] == "flat" and found["leak"] <= 1e-6 and found["against_alone"] <= 1e-4
