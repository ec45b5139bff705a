"""Whole runs that learn from a teacher: from the model itself at first, resumed, and refused for another teacher."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BloomConfig, BloomForCausalLM

from tests.fixtures import trainings
from tests.fixtures.newer_versions import shift
from tests.fixtures.trainings import launch, lines, loaded, outcome
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import DataError, RecipeError


def flags(teacher: Path, **others: str) -> dict[str, Any]:
    return {"method__kind": "distill", "method__teacher": str(teacher)} | others


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, a recipe, and what becomes the teacher: the model with other weights."""
    directory = trainings.prepare(tmp_path_factory.mktemp("taught"), 1, layers=1)
    model = directory / "model"
    load_tokenizer(str(model), None, TokenizerSection(name_or_path="byte")).save(model)
    shift(shutil.copytree(model, directory / "untouched"), 1)
    return directory


@pytest.fixture
def workplace(made: Path) -> Path:
    """Without the runs of the test before, and with the teacher and the recipe as they were."""
    for name in ("runs", "teacher"):
        shutil.rmtree(made / name, ignore_errors=True)
    shutil.copytree(made / "untouched", made / "teacher")
    trainings.prepare(made, 1, layers=1)
    return made


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_model_at_the_start_is_no_distance_from_itself(workplace: Path, adapter: str) -> None:
    own = flags(workplace / "model", method__beta="0.5", adapter__kind=adapter, train__stop_after="2 steps")
    if adapter == "lora":
        own["adapter__dropout"] = "0"
    else:
        own |= {"adapter__kind": "none"}
        trainings.in_full(workplace)
    first, second = lines(launch(workplace, name="own", **own).run_dir)
    assert (first["loss"], first["divergence"], first["agreement"], first["grad_norm"]) == (0, 0, 1, 0)
    assert first["ce"] == first["teacher_ce"] > 1
    assert "tail" not in first and second["loss"] == 0


def test_teacher_and_student_may_take_documents_apart(workplace: Path) -> None:
    """Each by its own class: rows are packed for both."""
    config = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(1)
    BloomForCausalLM(config).save_pretrained(workplace / "bloom")
    load_tokenizer(str(workplace / "model"), None, TokenizerSection(name_or_path="byte")).save(workplace / "bloom")
    mixed = {"data__packing": "auto", "adapter__kind": "none", "train__stop_after": "1 steps"}
    trainings.in_full(workplace)
    own = flags(workplace / "bloom", model__name_or_path=str(workplace / "bloom"), **mixed)
    (line,) = lines(launch(workplace, name="own", **own).run_dir)
    assert (line["loss"], line["agreement"]) == (0, 1)
    (line,) = lines(launch(workplace, name="other", **flags(workplace / "bloom", **mixed)).run_dir)
    assert line["teacher_ce"] > 1 and line["divergence"] > 0


def test_a_resumed_run_is_the_same_bit_for_bit_and_its_teacher_must_be(workplace: Path) -> None:
    learned = {"train__duration": "4 steps", "optimizer__lr": "1e-2"}
    taught = flags(workplace / "teacher", method__temperature="2", method__ce_weight="0.1", **learned)
    whole = launch(workplace, name="whole", **taught)
    launch(workplace, name="cut", train__stop_after="2 steps", **taught)
    again = launch(workplace, "must", name="cut", **taught)
    assert outcome(again.run_dir) == outcome(whole.run_dir)
    losses = [line["divergence"] for line in lines(whole.run_dir)]
    assert losses[-1] < 0.9 * losses[0]
    launch(workplace, name="other", train__stop_after="1 step", **taught)
    shift(workplace / "teacher", 2)
    with pytest.raises(DataError, match="the teacher changed since this checkpoint was saved"):
        launch(workplace, "must", name="other", **taught)


OFFLINE = {"method__top_k": "6", "method__temperature": "2", "method__beta": "0.3", "train__duration": "3 steps"}


@pytest.mark.slow
def test_columns_of_all_tokens_are_the_teacher_in_memory(workplace: Path) -> None:
    held = OFFLINE | {"data__eval": "9 documents", "eval__samples": "0", "adapter__dropout": "0"}
    found = {}
    for name, count in (("memory", "null"), ("columns", "300")):
        given = held | {"method__top_k": count}
        found[name] = lines(launch(workplace, name=name, **flags(workplace / "teacher", **given)).run_dir)
    assert [line["kind"] for line in found["columns"]] == [line["kind"] for line in found["memory"]]
    for kept, whole in zip(found["columns"], found["memory"], strict=True):
        for figure in whole.keys() & kept.keys() & {"loss", "divergence", "ce", "teacher_ce", "grad_norm"}:
            assert kept[figure] == pytest.approx(whole[figure], rel=1e-5), figure
    assert {line["tail"] for line in found["columns"] if "tail" in line} == {0}


def test_columns_are_computed_once_and_in_parts_and_training_loads_no_teacher(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.model.divergence import top_tokens
    from tuner.run import columns, teacher

    monkeypatch.setattr(columns, "PART_ROWS", 8)
    rows = list[int]()

    def killed(hidden: torch.Tensor, *rest: Any, **named: Any) -> dict[str, torch.Tensor]:
        rows.append(len(hidden))
        if len(rows) == 21:
            raise KeyboardInterrupt
        return top_tokens(hidden, *rest, **named)

    monkeypatch.setattr(teacher, "top_tokens", killed)
    taught = flags(workplace / "teacher", **OFFLINE)
    with pytest.raises(KeyboardInterrupt):
        launch(workplace, name="a", **taught)
    whole = launch(workplace, "auto", name="a", **taught)
    assert len(rows) == 21 + 45 - 16  # two parts of eight rows were kept
    monkeypatch.setattr(teacher, "load_teacher", lambda *given: pytest.fail("loaded"))
    launch(workplace, name="b", train__stop_after="1 step", **taught)
    (workplace / "teacher" / "model.safetensors").unlink()
    again = launch(workplace, "must", name="b", **taught)
    assert outcome(again.run_dir) == outcome(whole.run_dir)
    assert all(0 < line["tail"] < 1 for line in lines(again.run_dir))


def test_a_teacher_that_reads_other_tokens_is_refused_with_the_first_difference(workplace: Path) -> None:
    path = workplace / "teacher" / "tokenizer.json"
    swapped = {'"a"': '"b"', '"b"': '"a"'}
    path.write_text(re.sub('"[ab]"', lambda found: swapped[found[0]], path.read_text()))
    away = shutil.move(workplace / "teacher", workplace / "away")
    (workplace / "teacher").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(away / name, workplace / "teacher")
    with pytest.raises(DataError, match=r"method.teacher: .*teacher holds no tokenizer") as without:
        launch(workplace, name="x", **flags(workplace / "teacher"))
    assert without.value.hint == "copy the files of its tokenizer there (tokenizer.json, tokenizer_config.json)"
    shutil.rmtree(workplace / "teacher")
    shutil.move(away, workplace / "teacher")
    with pytest.raises(RecipeError, match="reads other tokens than the student: id 97 is 'a' to the student"):
        launch(workplace, name="x", **flags(workplace / "teacher"))
    with pytest.raises(RecipeError, match=r"method.teacher: .*/nowhere: no such directory"):
        launch(workplace, name="x", **flags(workplace / "nowhere"))


def test_a_check_of_the_recipe_finds_a_teacher_without_weights(workplace: Path) -> None:
    from tuner.setup.check import check_files
    from tuner.setup.findings import Findings

    (workplace / "teacher" / "model.safetensors").unlink()
    for teacher, said in (("teacher", "holds no weights"), ("nowhere", "no such directory")):
        found = Findings(loaded(workplace, method__kind="distill", method__teacher=str(workplace / teacher)))
        check_files(found.loaded.recipe, found)
        with pytest.raises(RecipeError, match=rf"method.teacher.*{said}"):
            found.raise_any()


@pytest.mark.slow
def test_the_teacher_is_in_the_predicted_memory(workplace: Path) -> None:
    from tuner.profile.devices import present_device
    from tuner.profile.predict import Target, predict
    from tuner.runtime.dist import RankInfo

    def parameters(**given: str) -> Any:
        recipe = loaded(workplace, **given).recipe
        return predict(recipe, Target(present_device("cpu"), RankInfo(), 1 << 40)).memory.moments[0].parts["parameters"]

    taught = flags(workplace / "teacher")
    size = sum(tensor.nbytes for tensor in load_file(workplace / "teacher" / "model.safetensors").values())
    assert parameters(**taught) - parameters() == pytest.approx(size, rel=0.01)


def test_the_teacher_is_in_no_checkpoint(workplace: Path) -> None:
    run = launch(workplace, name="saved", **flags(workplace / "teacher", train__stop_after="1 step")).run_dir
    tensors = [name for path in run.rglob("*.safetensors") for name in load_file(path)]
    assert tensors and all("lora" in name for name in tensors)
