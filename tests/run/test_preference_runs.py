"""Training on answers from end to end, of a policy by each method and of a reward model: evaluated, kept, stopped,
resumed bit for bit, proven, recorded and exported.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.api.exports import export_hf
from tuner.checkpoint.manifest import step_dirs
from tuner.config.load import load_recipe
from tuner.errors import DataError, RecipeError
from tuner.profile.devices import find_device
from tuner.profile.predict import Target, resolved_for
from tuner.profile.workload import workload
from tuner.run.score import Score, find_trained, score
from tuner.run.verify import verify_resume
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

SILENT = Console(main=False)
RECIPE = """\
model: {name_or_path: ./model}
tokenizer: {name_or_path: byte}
method: {kind: dpo}
data: {train: pairs.jsonl, eval: [long.jsonl, short.jsonl], max_length: 64, cache_dir: cache}
train: {duration: 4 steps, global_batch_size: 2, micro_batch_size: 1, precision: fp32, device: cpu}
optimizer: {lr: 1e-3}
eval: {every: 2 steps, samples: 1}
checkpoint: {every: 2 steps, keep: 1, keep_best: eval/margin/short}
logging: {level: warning}
"""
LORA = {"adapter__kind": "lora", "adapter__r": "4", "adapter__dropout": "0.2"}
FIGURES = ("reward_chosen", "reward_rejected", "margin", "accuracy", "logp_chosen", "logp_rejected")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = trainings.prepare(tmp_path_factory.mktemp("pairs"), 1, layers=1)
    rng = random.Random(1)
    for name, count in (("pairs", 24), ("long", 4), ("short", 3)):
        rows = [
            {"prompt": f"{i} ", "chosen": "ab" * rng.randint(1, 3), "rejected": "cd" * rng.randint(1, 3)}
            for i in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "r.yaml").write_text(RECIPE)
    return directory


@pytest.fixture(scope="module", params=["adapter_off", "columns"])
def finished(place: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, str]]:
    """A run that was never stopped, and its flags."""
    flags = {**(LORA if request.param == "adapter_off" else {}), "method__reference": request.param}
    return launch(place, name=f"whole-{request.param}", **flags).run_dir, flags


def measured(path: Path, recipe: Path | None, **flags: str) -> Score:
    place = path.parents[1] if recipe is None else recipe.parent
    return score(find_trained(path, SILENT), trainings.loaded(place, **flags), RankInfo(), SILENT)


def test_evaluations_have_the_figures_of_each_source_and_keep_the_best(finished: tuple[Path, dict[str, str]]) -> None:
    run, _ = finished
    evaluations = [line for line in lines(run) if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    names = [f"{name}{of}" for name in ("loss", *FIGURES) for of in ("", "/long", "/short")]
    assert all(set(names) < set(line) for line in evaluations)
    assert evaluations[0]["margin"] == evaluations[0]["reward_chosen"] == 0.0, "it begins as its reference"
    assert evaluations[-1]["margin"] > 0.0
    trained = [line for line in lines(run) if line["kind"] == "train"]
    assert all(set(FIGURES) < set(line) for line in trained)
    of_short = {line["step"]: line["margin/short"] for line in evaluations[1:]}
    best = trainings.record(run)["best"]
    assert best == {"metric": "eval/margin/short", "step": max(of_short, key=of_short.__getitem__)} | {
        "value": max(of_short.values())
    }
    assert {best["step"], 4} <= {step for step, _ in step_dirs(run / "checkpoints")}
    answers = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert answers[0]["prompt"].strip() == "0" and set(answers[0]["reference"]) == set("ab")


@pytest.mark.slow("adapter_off")
def test_it_resumes_bit_for_bit(place: Path, finished: tuple[Path, dict[str, str]]) -> None:
    whole, flags = finished
    flags = {**flags, "name": f"parts-{whole.name}"}
    recorded = {"profile__steps": "[2]"} if "adapter__kind" in flags else {}
    stopped = launch(place, train__stop_after="3 steps", **flags, **recorded)
    assert (stopped.status, stopped.step) == ("stopped", 3)
    assert not recorded or list((stopped.run_dir / "profile").iterdir()), "a step was recorded on the way"
    ended = launch(place, "must", **flags).run_dir
    assert outcome(ended) == outcome(whole)
    figures = [[{k: line.get(k) for k in FIGURES} for line in lines(run)] for run in (whole, ended)]
    assert figures[0] == figures[1]
    if "adapter__kind" in flags:
        assert verify_resume(ended, 1, SILENT, own_process=False).steps == 2
    else:
        with pytest.raises(RecipeError, match="method.beta"):
            launch(place, "must", **flags, method__beta="0.5")


def test_a_trained_model_is_measured_as_its_run_was(place: Path, finished: tuple[Path, dict[str, str]]) -> None:
    run, flags = finished
    last = [line for line in lines(run) if line["kind"] == "eval"][-1]
    found = measured(run, place / "r.yaml", **flags).evaluation.line()
    assert found == {name: last[name] for name in found} and len(found) == 21
    smaller = measured(run, place / "r.yaml", **flags, train__global_batch_size="1").evaluation.line()
    assert smaller == pytest.approx(found, rel=1e-6, abs=1e-7)
    assert measured(run, place / "r.yaml", **flags).measure == "dpo"


@pytest.mark.slow("adapter_off")
def test_what_an_export_is_measured_by_does_not_depend_on_the_cache(
    place: Path, finished: tuple[Path, dict[str, str]]
) -> None:
    run, flags = finished
    exported, last = export_hf(run).path, [line for line in lines(run) if line["kind"] == "eval"][-1]
    alone = measured(exported, place / "r.yaml")
    assert alone.measure == "answers_alone"
    assert alone.evaluation.figures.keys() == {"accuracy", "accuracy_per_token", "logp_chosen", "logp_rejected"}
    assert alone.evaluation.figures["logp_chosen"] == pytest.approx(last["logp_chosen"], rel=1e-3)  # merged, or bf16
    columns = place / "cache" / "reference"
    if "adapter__kind" in flags:
        return
    columns.rename(place / "away")
    try:
        assert measured(exported, place / "r.yaml").evaluation == alone.evaluation
        with pytest.raises(DataError, match=r"reference/\w+ is gone"):
            measured(run, place / "r.yaml", **flags)
    finally:
        (place / "away").rename(columns)


def test_the_first_batch_alone_is_learned(place: Path) -> None:
    flags: dict[str, Any] = {"train__duration": "5 steps", "eval__every": "never", "eval__at_start": "false"}
    flags |= {"optimizer__lr": "2e-2", "method__beta": "1", **LORA}
    run = launch(place, name="overfit", train__overfit_first_batch="true", **flags)
    trained = [line for line in lines(run.run_dir) if line["kind"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"] * 0.8 and trained[-1]["accuracy"] == 1.0


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, pairs of which two or more share a row, and a recipe with an adapter."""
    directory = trainings.prepare(tmp_path_factory.mktemp("rewards"), 1)
    rng = random.Random(0)
    answers = ["ab" * rng.randint(1, 6) for _ in range(40)]
    rows = [{"prompt": f"{i} ", "chosen": f"{text}.", "rejected": f"{text}?"} for i, text in enumerate(answers)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (directory / "r.yaml").read_text().replace("packing: false", "packing: true, eval: 6 documents")
    text = text.replace("duration: 3 epochs, global_batch_size: 8", "duration: 5 steps, global_batch_size: 4")
    (directory / "r.yaml").write_text(f"{text}method: {{kind: reward, center: 0.01}}\n")
    return directory


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_evaluated_and_exported(rewards: Path) -> None:
    whole = launch(rewards, name="whole", checkpoint__keep_best="eval/accuracy").run_dir
    launch(rewards, name="cut", train__stop_after="3 steps", checkpoint__keep_best="eval/accuracy")
    cut = launch(rewards, "auto", name="cut", checkpoint__keep_best="eval/accuracy").run_dir
    assert outcome(cut) == outcome(whole)
    trained, evaluated = ([line for line in lines(whole) if line["kind"] == kind] for kind in ("train", "eval"))
    for line in trained:
        assert line["loss"] == pytest.approx(line["ranking"] + line["center"])
        assert line["margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"], abs=1e-6)
    assert trained[-1]["loss"] < trained[0]["loss"] and evaluated[-1]["accuracy"] == 1
    assert not (whole / "samples.jsonl").exists() or not (whole / "samples.jsonl").read_text()

    found = score(find_trained(whole, SILENT), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), SILENT)
    assert found.evaluation.loss == evaluated[-1]["loss"]
    assert found.evaluation.figures["accuracy"] == 1
    exported = export_hf(whole, rewards / "exported", dtype="fp32").path
    again = score(find_trained(exported, SILENT), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), SILENT)
    assert again.evaluation.loss == pytest.approx(found.evaluation.loss, rel=1e-5)
    with pytest.raises(RecipeError, match="is no reward model"):
        score(find_trained(rewards / "model", SILENT), load_recipe(whole / "recipe.resolved.yaml"), RankInfo(), SILENT)


def test_probes_end_as_documents_do(rewards: Path) -> None:
    flags = {"train__duration": "1 steps", "eval__at_start": "false", "eval__at_end": "false"}
    run = launch(rewards, name="probes", **flags).run_dir
    probe = load_file(run / "checkpoints" / "step-1" / "probe.safetensors")
    last = {int(row[length - 1]) for row, length in zip(probe["input_ids"], probe["lengths"], strict=True)}
    assert probe["logits"].shape == (20, 1) and probe["logits"].dtype == torch.float32
    assert len(last) == 1  # the end token of every answer, whatever its text


def test_a_prediction_answers_no_samples(rewards: Path) -> None:
    recipe = trainings.loaded(rewards).recipe
    target = Target(find_device("cpu"), RankInfo(), 1 << 40)
    resolved, _ = resolved_for(recipe, target)
    assert recipe.eval.samples > 0
    assert workload(recipe, resolved, target.rank_info).samples == ()


ANSWERS = """\
model: {name_or_path: ./model, kernels: torch}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 64, cache_dir: cache}
train: {duration: 4 steps, global_batch_size: 4, micro_batch_size: 1, precision: fp32, device: cpu}
optimizer: {lr: 5e-3}
logging: {level: warning}
"""


@pytest.fixture(scope="module")
def answers_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = trainings.prepare(tmp_path_factory.mktemp("answers"), 1)
    (directory / "r.yaml").write_text(ANSWERS)
    rng = random.Random(1)
    answers = [(f"question {i} ", "ab" * rng.randint(1, 4), "cd" * rng.randint(1, 4)) for i in range(40)]
    pairs = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in answers]
    labels = [
        {"prompt": prompt, "completion": answer, "label": is_good}
        for prompt, good, bad in answers
        for answer, is_good in ((good, True), (bad, False))
    ]
    for name, rows in (("pairs", pairs), ("labels", labels)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def steps(answers_place: Path, name: str, rows: str, **flags: str) -> list[dict[str, Any]]:
    result = launch(answers_place, name=name, data__train=f"{rows}.jsonl", **flags)
    return [line for line in lines(result.run_dir) if line["kind"] == "train"]


def test_kto_begins_at_its_reference_and_learns_which_answers_are_good(answers_place: Path) -> None:
    """Mismatched answers included."""
    found = steps(answers_place, "kto", "labels", method__kind="kto", adapter__kind="lora")
    first, last = found[0], found[-1]
    assert first["kl"] == first["reward_desirable"] == first["reward_undesirable"] == 0.0
    assert first["loss"] == 0.5
    assert last["reward_desirable"] > last["reward_undesirable"]


@pytest.mark.slow("simpo", "cpo")
@pytest.mark.parametrize("method", ["orpo", "simpo", "cpo"])
def test_methods_without_a_reference_learn_to_prefer(answers_place: Path, method: str) -> None:
    found = steps(answers_place, method, "pairs", method__kind=method)
    assert found[-1]["margin"] > found[0]["margin"]
    assert found[-1]["loss"] < found[0]["loss"]


def test_dpo_of_several_losses_logs_each(answers_place: Path) -> None:
    flags = {"method__kind": "dpo", "method__loss": "{sigmoid: 0.8, bco: 0.2}", "method__sft_weight": "0.1"}
    found = steps(answers_place, "several", "pairs", **flags)
    for line in found:
        assert line["loss"] == pytest.approx(line["sigmoid"] + line["bco"] + line["sft"], rel=1e-6)
    assert found[0]["margin"] == 0.0 < found[-1]["margin"]
