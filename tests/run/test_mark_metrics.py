"""The file of figures beside each mark: of its step and its evaluation, over stops and resumes."""

import json
from pathlib import Path

from tests.fixtures.trainings import launch, lines
from tuner.run.tasks.trackers.choose import point_of

MARKED = {
    "train__duration": "10 steps", "eval__samples": "0", "data__eval": "4 documents", "eval__every": "3 steps",
    "eval__marks": "[4 steps, 8 steps]", "checkpoint__marks": "[10 steps]", "checkpoint__at_start": "true",
}  # fmt: skip


def test_each_mark_has_its_figures(workplace: Path) -> None:
    run = launch(workplace, **MARKED, train__stop_after="5 steps").run_dir
    marks = run / "marks"
    assert sorted(path.name for path in marks.iterdir()) == ["metrics_step0.json", "metrics_step4.json"]
    (marks / "metrics_step8.json").write_text("{}")  # of a launch that was killed before it saved that step
    launch(workplace, "must", **MARKED, train__stop_after="1 steps")
    assert not (marks / "metrics_step8.json").exists(), "it is measured again"
    launch(workplace, "must", **MARKED)
    assert {path.name for path in marks.iterdir()} == {f"metrics_step{step}.json" for step in (0, 4, 8, 10)}
    for step in (0, 4, 8, 10):
        found = json.loads((marks / f"metrics_step{step}.json").read_text())
        of_step = [line for line in lines(run) if line["step"] == step]
        assert {line["kind"] for line in of_step} == ({"train", "eval"} if step else {"eval"})
        wanted = {name: value for line in of_step for name, value in point_of(line).values.items()}
        assert found == {"step": step, "tokens": next((line["tokens"] for line in of_step if step), 0), **wanted}
        assert found["eval/loss"] > 0


def test_a_run_without_marks_has_no_such_file(workplace: Path) -> None:
    run = launch(workplace, train__duration="2 steps").run_dir
    assert not (run / "marks").exists()
