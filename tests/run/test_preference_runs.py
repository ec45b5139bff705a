"""Training on pairs from end to end: evaluated, kept, stopped, resumed bit for bit, proven, recorded and exported."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.api.exports import export_hf
from tuner.checkpoint.manifest import step_dirs
from tuner.errors import DataError, RecipeError
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
