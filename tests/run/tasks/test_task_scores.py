"""Tasks are scored during a run: in its log, in its directory, for the best and the end; training does not notice. And
what a launch says beside its figures.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import quiz, trainings
from tests.fixtures.trainings import launch, lines
from tuner.errors import MachineError, PluginError, RecipeError, TunerError
from tuner.evals import load
from tuner.run.tasks import evaluate
from tuner.run.tasks import evaluate as evaluate_task
from tuner.rundir.record import read_run, task_figures
from tuner.runtime.console import Console, one_line
from tuner.runtime.dist import RankInfo

SHORT = {"train__duration": "4 steps", "checkpoint__every": "never"}
FIGURES = {
    "choice/acc", "choice/acc_norm", "choice/bits_per_byte", "text/perplexity", "text/bits_per_byte",
    "question/exact_match",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with tasks at every other step and none held out, and the same without."""
    directory = trainings.prepare(tmp_path_factory.mktemp("scored"), 1, layers=1)
    launch(directory, **SHORT, name="plain")
    tasks = quiz.flag(directory / "tasks")
    best = {"checkpoint__keep_best": "eval/text/bits_per_byte", "checkpoint__keep": "1"}
    launch(directory, **SHORT, **best, name="scored", eval__tasks=tasks, eval__every="2 steps")
    return directory


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run) if line["kind"] == "eval"]


@pytest.mark.slow
def test_training_is_the_same_with_and_without(place: Path) -> None:
    plain, scored = (trainings.outcome(place / "runs" / name) for name in ("plain", "scored"))
    assert scored["sha256"] == plain["sha256"]
    assert [line for line in scored["log"] if line["kind"] == "train"] == plain["log"]


def test_every_evaluation_has_the_figures_and_what_they_cost(place: Path) -> None:
    found = evaluations(place / "runs" / "scored")
    assert [line["step"] for line in found] == [0, 2, 4]
    for line in found:
        assert set(line) == {"kind", "step", "eval_s", "tasks_s"} | FIGURES
        assert 0 < line["tasks_s"] <= line["eval_s"]
    assert found[0]["text/perplexity"] != found[-1]["text/perplexity"], "the weights that train are asked"


def test_the_results_of_items_are_kept(place: Path) -> None:
    for line in evaluations(place / "runs" / "scored"):
        for name in quiz.TASKS:
            kept = place / "runs" / "scored" / "evaluations" / f"step-{line['step']}" / f"{name}.jsonl"
            results = [json.loads(one) for one in kept.read_text().splitlines()]
            assert len(results) == 5 and len({result["id"] for result in results}) == 5
            if name == "choice":
                acc = sum(result["figures"]["acc"] for result in results) / 5
                assert acc == pytest.approx(line["choice/acc"])


def test_the_best_checkpoint_goes_by_a_figure_of_a_task(place: Path) -> None:
    run = place / "runs" / "scored"
    record = trainings.record(run)
    values = {line["step"]: line["text/bits_per_byte"] for line in evaluations(run) if line["step"]}
    best = min(values, key=lambda step: values[step])
    assert record["best"] == {"metric": "eval/text/bits_per_byte", "step": best, "value": values[best]}
    assert (run / "checkpoints" / f"step-{best}").is_dir()
    assert task_figures(read_run(run))["question"].keys() == {"exact_match"}


def test_a_run_ends_early_by_a_figure_of_a_task(place: Path) -> None:
    (choice, *_) = quiz.write(place / "tasks")
    flags = {"eval__tasks": json.dumps([{"task": choice, "every": "1 step"}]), "eval__min_delta": "1"}
    best = {"checkpoint__keep_best": "eval/choice/acc", "eval__patience": "2", "eval__every": "never"}
    launch(place, **{**SHORT, "train__duration": "9 steps"}, **flags, **best, name="early")
    record = trainings.record(place / "runs" / "early")
    assert "eval/choice/acc did not rise by 1 above the" in record["launches"][-1]["why"]
    assert [line["step"] for line in evaluations(place / "runs" / "early")] == [0, 1, 2]


def test_a_task_with_a_cadence_of_its_own_is_left_out_between(place: Path) -> None:
    choice, text, _ = quiz.write(place / "tasks")
    tasks = json.dumps([choice, {"task": text, "every": "3 steps", "name": "rare", "max_items": 2}])
    flags = {"data__eval": "25%", "eval__every": "1 step", "eval__samples": "0", "eval__at_end": "false"}
    launch(place, **SHORT, **flags, eval__tasks=tasks, name="rare")
    found = evaluations(place / "runs" / "rare")
    assert [("rare/perplexity" in line, "choice/acc" in line, "loss" in line) for line in found] == [
        (True, True, True), (False, True, True), (False, True, True), (True, True, True), (False, True, True),
    ]  # fmt: skip


def test_an_evaluation_that_was_cut_short_is_repeated(place: Path) -> None:
    flags = {**SHORT, "eval__tasks": quiz.flag(place / "tasks"), "eval__every": "2 steps", "name": "cut"}
    calls = {"forwards": 0}

    def cut(wanted: bool, group: object) -> bool:
        calls["forwards"] += 1
        return calls["forwards"] == 5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "any_rank", cut)
        assert launch(place, **flags).status == "stopped"
    launch(place, "auto", **flags)
    cut_run, whole = (evaluations(place / "runs" / name) for name in ("cut", "scored"))
    timeless = [{k: v for k, v in line.items() if not k.endswith("_s")} for line in cut_run]
    assert timeless == [{k: v for k, v in line.items() if not k.endswith("_s")} for line in whole]


PLUGINS = """
import random
def items(count=3):
    random.seed(1)
    return [{"prompt": f"{i} ", "answer": "ab"} for i in range(count)]
def length(answer, item, scale=1.0):
    return {"length": len(answer) * scale, "right": item["answer"][0] in answer}
def words(answer, item):
    return "good"
"""


def test_items_and_scorers_of_the_users_own(place: Path) -> None:
    (place / "own.py").write_text(PLUGINS)
    question = quiz.write(place / "tasks")[2]
    tasks = [
        {"task": "own.py:items", "options": {"count": 2}, "max_new_tokens": 3},
        {"task": question, "name": "measured", "scorer": "own.py:length", "options": {"scale": 2}, "max_new_tokens": 3},
    ]
    flags = {**SHORT, "train__duration": "1 step", "eval__every": "never", "eval__at_end": "false"}
    launch(place, **flags, eval__tasks=json.dumps(tasks), name="own")
    (line,) = evaluations(place / "runs" / "own")
    assert {"items/exact_match", "measured/length", "measured/right"} < set(line)
    kept = (place / "runs" / "own" / "evaluations" / "step-0" / "measured.jsonl").read_text().splitlines()
    for result in map(json.loads, kept):
        assert result["figures"]["length"] == 2 * len(result["answer"])
    short = {"task": question, "max_new_tokens": 2}
    for task, said in (
        ({**short, "scorer": "own.py:words"}, "the scorer of eval.tasks question gave 'good'"),
        ({"task": question, "scorer": "own.py:length", "options": {"sale": 1}}, "has no option sale"),
        ({"task": "own.py:item"}, "did you mean items?"),
        ({"task": quiz.write(place / "tasks")[0], "scorer": "own.py:length"}, "a scorer marks generated answers"),
        ({"task": question}, "max_new_tokens 64 leaves no room for a prompt in 64 tokens"),
    ):
        with pytest.raises(TunerError) as error:
            launch(place, **flags, eval__tasks=json.dumps([task]), name=f"wrong-{len(said)}")
        assert said in f"{error.value.message} {error.value.hint}"
        assert isinstance(error.value, (PluginError, TunerError))


def test_a_figure_that_no_task_measures_is_refused(place: Path) -> None:
    with pytest.raises(RecipeError, match="no task measures eval/choice/accuracy") as error:
        launch(
            place, **SHORT, eval__tasks=quiz.flag(place / "tasks"), checkpoint__keep_best="eval/choice/accuracy",
            name="unknown",
        )  # fmt: skip
    assert error.value.hint == "write eval/choice/acc or eval/choice/acc_norm or eval/choice/bits_per_byte"


def test_the_harness_is_asked_for_where_it_is_not_installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="lm-evaluation-harness is not installed") as error:
        launch(place, **SHORT, eval__tasks="[lm_eval:hellaswag]", name="harness")
    assert error.value.hint == "install it: pip install lm-eval"


WIDTH = 140


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" two\nlines ", "two lines"),
        ("\n\n\t", r"'\n\n\t'"),
        ("\u2003 ", r"'\u2003 '"),
        ("", "''"),
        ("x" * 200, "x" * (WIDTH - 1) + "…"),
        ("\n" * 200, ("'" + r"\n" * 200)[: WIDTH - 1] + "…"),
    ],
)
def test_a_sample_in_one_line(text: str, shown: str) -> None:
    assert one_line(text, WIDTH) == shown


@pytest.mark.parametrize(("free", "answered"), [(1300, True), (1100, False)])
def test_answers_of_several_processes_need_room_for_the_whole_model(
    free: int, answered: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    gathers: list[Any] = []
    real = evaluate_task.EvaluateTask.__init__

    def among_two(task: Any, context: Any, *args: Any) -> None:
        real(task, context, *args)
        task._assembly = replace(task._assembly, rank_info=RankInfo(0, 2, 0, 2))

    monkeypatch.setattr(evaluate_task.EvaluateTask, "__init__", among_two)
    monkeypatch.setattr("tuner.parallel.gathered.whole_bytes", lambda root: 1000)
    monkeypatch.setattr("tuner.parallel.gathered.gathered", lambda root: nullcontext(gathers.append(root)))
    monkeypatch.setattr(evaluate_task, "room_on", lambda device, processes: free)
    monkeypatch.setattr(Console, "warn", lambda console, text: said.append(text))
    flags = {"data__eval": "7 documents", "eval__every": "2 steps", "eval__samples_at": "all"}
    run = trainings.launch(workplace, train__duration="2 steps", **flags).run_dir
    assert (run / "samples.jsonl").is_file() == answered
    assert bool(gathers) == answered, "once for all tokens of all answers"
    assert [text.split(":")[0] for text in said if "samples" in text] == ([] if answered else ["eval.samples"])
