"""Runs of reward models on real rows: resumed bit for bit, evaluated again, exported, and refused for text."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.api.exports import export_hf
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.profile.devices import find_device
from tuner.profile.predict import Target, resolved_for
from tuner.profile.workload import workload
from tuner.run.score import find_trained, score
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

QUIET = Console(main=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, pairs of which two or more share a row, and a recipe with an adapter."""
    directory = trainings.prepare(tmp_path_factory.mktemp("place"), 1)
    rng = random.Random(0)
    answers = ["ab" * rng.randint(1, 6) for _ in range(40)]
    rows = [{"prompt": f"{i} ", "chosen": f"{text}.", "rejected": f"{text}?"} for i, text in enumerate(answers)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (directory / "r.yaml").read_text().replace("packing: false", "packing: true, eval: 6 documents")
    text = text.replace("duration: 3 epochs, global_batch_size: 8", "duration: 5 steps, global_batch_size: 4")
    (directory / "r.yaml").write_text(f"{text}method: {{kind: reward, center: 0.01}}\n")
    return directory


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_evaluated_and_exported(place: Path) -> None:
    whole = launch(place, name="whole", checkpoint__keep_best="eval/accuracy").run_dir
    launch(place, name="cut", train__stop_after="3 steps", checkpoint__keep_best="eval/accuracy")
    cut = launch(place, "auto", name="cut", checkpoint__keep_best="eval/accuracy").run_dir
    assert outcome(cut) == outcome(whole)
    trained, evaluated = ([line for line in lines(whole) if line["kind"] == kind] for kind in ("train", "eval"))
    for line in trained:
        assert line["loss"] == pytest.approx(line["ranking"] + line["center"])
        assert line["margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"], abs=1e-6)
    assert trained[-1]["loss"] < trained[0]["loss"] and evaluated[-1]["accuracy"] == 1
    assert not (whole / "samples.jsonl").exists() or not (whole / "samples.jsonl").read_text()

    found = score(find_trained(whole, QUIET), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), QUIET)
    assert found.evaluation.loss == evaluated[-1]["loss"]
    assert found.evaluation.figures["accuracy"] == 1
    exported = export_hf(whole, place / "exported", dtype="fp32").path
    again = score(find_trained(exported, QUIET), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), QUIET)
    assert again.evaluation.loss == pytest.approx(found.evaluation.loss, rel=1e-5)
    with pytest.raises(RecipeError, match="is no reward model"):
        score(find_trained(place / "model", QUIET), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), QUIET)


def test_probes_end_as_documents_do(place: Path) -> None:
    run = launch(place, name="probes", train__duration="1 steps", eval__at_start="false", eval__at_end="false").run_dir
    probe = load_file(run / "checkpoints" / "step-1" / "probe.safetensors")
    last = {int(row[length - 1]) for row, length in zip(probe["input_ids"], probe["lengths"], strict=True)}
    assert probe["logits"].shape == (20, 1) and probe["logits"].dtype == torch.float32
    assert len(last) == 1  # the end token of every answer, whatever its text


def test_a_prediction_answers_no_samples(place: Path) -> None:
    recipe = trainings.loaded(place).recipe
    target = Target(find_device("cpu"), RankInfo(), 1 << 40)
    resolved, _ = resolved_for(recipe, target)
    assert recipe.eval.samples > 0
    assert workload(recipe, resolved, target.rank_info).samples == ()
