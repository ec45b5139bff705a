"""The reference of a run: computed once, kept, found again, and exactly the policy before the first step."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import paired
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch, lines, outcome
from tuner.cli.main import main
from tuner.data.building.columns import PART_ROWS, Builder, open_columns
from tuner.data.prepared import Row
from tuner.errors import RecipeError, VerificationError
from tuner.run import columns, reference
from tuner.run.options import LaunchOptions
from tuner.run.status import resume_source
from tuner.runtime.files import read_json

PAIRS = 24
ZEROS = {"reward_chosen": 0.0, "reward_rejected": 0.0, "margin": 0.0}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one run has left its columns; nobody else runs there."""
    directory = paired.prepare(tmp_path_factory.mktemp("begun"), PAIRS, layers=1)
    launch(directory, train__duration="1 steps", name="first")
    return directory


@pytest.fixture
def place(tmp_path: Path, begun: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "w"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path_factory.mktemp("made") / "w"))


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "cache" / "reference").glob("[0-9a-f]*"))


def first_figures(run: Path) -> dict[str, Any]:
    line = lines(run)[0]
    return {name: line[name] for name in ZEROS}


CASES: dict[str, dict[str, str]] = dict(cases(__file__, "a_run_begins_as_its_reference_to_the_last_bit"))


@pytest.mark.slow("native kernels, two rows at once, dropout of the model", "dora", "bf16")
@pytest.mark.parametrize("name", CASES)
def test_a_run_begins_as_its_reference_to_the_last_bit(made: Path, name: str) -> None:
    flags = CASES[name]
    run = launch(made, train__duration="2 steps", name=str(list(CASES).index(name)), **flags).run_dir
    assert first_figures(run) == ZEROS
    assert any(lines(run)[1][figure] != 0 for figure in ZEROS)
    (of_run,), (first,) = (read_json(made / "runs" / one / "run.json")["launches"] for one in (run.name, "first"))
    assert of_run.get("reference") != first["reference"]
    assert ("reference" in of_run) == (name != "dora" and not name.startswith("lora in"))


def test_columns_hold_what_the_model_gives_and_are_found_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory,) = kept(place)
    found = open_columns(directory, "reference", verify=True)
    manifest = read_json(directory / "manifest.json")
    assert {split: part["reference"].dtype.name for split, part in found.items()} == dict.fromkeys(found, "float32")
    assert len(found["train"]["reference"]) == manifest["report"]["train"]["documents"] == 2 * PAIRS
    assert (found["train"]["reference"] < 0).all()
    monkeypatch.setattr(Builder, "add", lambda *given: pytest.fail("computed again"))
    launch(place, train__duration="1 steps", name="second", method__beta="0.3", seed="7")
    assert kept(place) == [directory]


def test_a_model_that_is_not_its_reference_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = columns.open_columns

    def other(*given: Any, **options: Any) -> dict[str, dict[str, Any]]:
        found = real(*given, **options)
        found["eval"]["reference"] = np.nextafter(found["eval"]["reference"], np.float32(0))
        return found

    monkeypatch.setattr(columns, "open_columns", other)
    with pytest.raises(VerificationError, match=r"not its reference: document \d+ of eval: its reference differs by -"):
        launch(place, train__duration="1 steps", name="second")
    assert not (place / "runs" / "second" / "run.json").exists()


def test_an_adapter_that_does_not_begin_at_nothing_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.model import adapter

    real = adapter.add_lora

    def begun(model: Any, spec: Any, seed: int) -> None:
        real(model, spec, seed)
        for _, layer in adapter.lora_layers(model):
            layer.lora_B["default"].weight.data.fill_(1e-3)

    monkeypatch.setattr(adapter, "add_lora", begun)
    with pytest.raises(VerificationError, match="not its reference") as caught:
        launch(made, train__duration="1 steps", name="begun", adapter__kind="lora")
    assert "method.reference: columns" in str(caught.value.hint)


def test_what_is_computed_survives_its_end_and_what_is_damaged_does_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory,) = kept(place)
    wanted = {path.name: path.read_bytes() for path in directory.glob("*.npy")}
    shutil.rmtree(directory)
    monkeypatch.setattr("tuner.data.building.columns.PART_ROWS", 4)
    monkeypatch.setattr(columns, "PART_ROWS", 4)
    real, added = Builder.add, list[tuple[str, int]]()

    def dying(self: Builder, split: str, number: int, values: Any) -> None:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append((split, number))
        real(self, split, number, values)

    with monkeypatch.context() as patch:
        patch.setattr(Builder, "add", dying)
        with pytest.raises(KeyboardInterrupt):
            launch(place, train__duration="1 steps", name="second")
    (parts,) = directory.parent.glob(".tmp-*")
    damaged = parts / "train-00000001.npz"
    damaged.write_bytes(damaged.read_bytes()[:-30])  # what a disk may do: it is computed again

    def noted(self: Builder, split: str, number: int, values: Any) -> None:
        added.append((split, number))
        real(self, split, number, values)

    monkeypatch.setattr(Builder, "add", noted)
    launch(place, train__duration="1 steps", name="second")
    assert added[:3] == [("train", 0), ("train", 1), ("train", 1)]
    assert len(set(added)) == len(added) - 1
    assert {path.name: path.read_bytes() for path in directory.glob("*.npy")} == wanted
    assert not list(directory.parent.glob(".tmp-*"))
    assert PART_ROWS == 128


def test_a_resumed_run_has_the_columns_of_its_beginning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launch(place, name="whole", train__duration="3 steps")
    stopped = launch(place, name="cut", train__duration="3 steps", train__stop_after="2 steps")
    (directory,) = kept(place)
    resumed, content = resume_source(stopped.run_dir), (directory / "train.reference.npy").read_bytes()
    assert read_json(stopped.run_dir / "run.json")["launches"][0]["reference"]["key"] == directory.name
    shutil.rmtree(directory)
    weights = place / "model" / "model.safetensors"
    known = weights.read_bytes()
    weights.write_bytes(known[:-3] + bytes([known[-3] ^ 1]) + known[-2:])
    with pytest.raises(VerificationError, match="is not the model any more"):
        train(resumed)
    weights.write_bytes(known)

    def zeros(rows: Any, row: Row) -> dict[str, Any]:
        return {"reference": np.zeros(len(row.documents), np.float32)}

    with monkeypatch.context() as patch:
        patch.setattr(reference, "values_of", lambda assembly: zeros)
        with pytest.raises(VerificationError, match="not those of before"):
            train(resumed)
    assert kept(place) == list(directory.parent.glob(".tmp-*")) == []
    monkeypatch.setattr(reference, "DECIDING", ())  # other versions: another key, but the run keeps its own
    assert outcome(train(resumed)) == outcome(whole.run_dir)
    assert kept(place) == [directory]  # computed again, from the base model and not from the checkpoint
    assert (directory / "train.reference.npy").read_bytes() == content


def train(loaded: Any) -> Path:
    from tuner.run.main import train as train_run
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    return train_run(loaded, LaunchOptions("must"), RankInfo(), Console(main=False)).run_dir


def test_answers_with_labels_have_a_reference_of_their_mismatched_ones(made: Path) -> None:
    data = {"data__train": "rows-labels.jsonl", "data__eval": "held-labels.jsonl", "method__kind": "kto"}
    run = launch(made, train__duration="1 steps", name="kto", **data).run_dir
    assert lines(run)[0]["kl"] == lines(run)[0]["reward_desirable"] == 0.0
    noted = read_json(run / "run.json")["launches"][0]["reference"]
    names = {"eval.reference.npy", "eval.reference_mismatched.npy"}
    assert set(noted["files"]) == names | {name.replace("eval", "train") for name in names}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"adapter__modules_to_save": "[lm_head]"}, "modules are trained besides the adapter: lm_head"),
        ({"adapter__kind": "dora", "train__precision": "bf16"}, "DoRA on bf16 weights"),
        ({"adapter__kind": "none"}, "adapter.kind: none"),
    ],
)
def test_a_model_without_its_adapter_must_be_the_one_at_the_start(made: Path, flags: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        launch(made, **{"adapter__kind": "lora", "method__reference": "adapter_off", "name": "no", **flags})


def test_dropouts_of_a_model_are_found_by_their_names() -> None:
    from transformers import GPT2Config, MixtralConfig

    from tuner.model.build import dropouts_of

    assert set(dropouts_of(GPT2Config())) == {
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout",
    }  # fmt: skip
    assert dropouts_of(MixtralConfig(router_jitter_noise=0.01)) == {"router_jitter_noise": 0.01}


def test_prepare_data_computes_it_and_data_shows_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (directory,) = kept(place)
    shutil.rmtree(directory)
    monkeypatch.chdir(place)
    cache = ["--cache-dir", "cache"]

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return int(ended.value.code or 0), "".join(capfd.readouterr())

    assert run("prepare-data", "r.yaml", "--reference")[0] == 0
    assert kept(place) == [directory]
    code, said = run("prepare-data", "r.yaml", "--reference", "--adapter.kind", "lora")
    assert (code, "computed in each step" in said) == (2, True)
    code, said = run("prepare-data", "r.yaml", "--reference", "--method.kind", "orpo")
    assert (code, "has no reference" in said) == (2, True)
    assert f"reference  {directory.name}" in run("data", "list", *cache)[1]
    prepared = json.loads((directory / "manifest.json").read_text())["prepared_key"]
    assert f"prepared/{prepared}" in run("data", "show", str(directory))[1]
    assert run("data", "verify", *cache)[0] == 0
    shutil.rmtree(place / "cache" / "prepared" / prepared)
    assert "its prepared data is not there" in run("data", "gc", "--unused", "--dry-run", *cache)[1]
    with (directory / "eval.reference.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    code, said = run("data", "verify", *cache)
    assert (code, "eval.reference.npy" in said) == (6, True)
    assert "eval.reference.npy" in run("data", "gc", "--verify", *cache)[1]
    assert kept(place) == []
