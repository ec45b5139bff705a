"""What a launch says beside its figures."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tuner.run.tasks import evaluate as evaluate_task
from tuner.runtime.console import Console, one_line
from tuner.runtime.dist import RankInfo

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
