"""`tuner eval`: the training's own losses again, of runs, checkpoints and Hugging Face directories."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.caches import new_cache
from tests.fixtures import commands, trainings
from tests.multi import launcher
from tuner.api.exports import export_hf
from tuner.cli.work.eval import _check_flags
from tuner.config.load import Override, load_recipe
from tuner.errors import DataError, DivergedError, RecipeError
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.run.score import Score, find_trained, run_recipe, score
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.train.evaluate import Evaluation

QUIET = Console(main=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a LoRA run of four steps, evaluated on two held-out files."""
    directory = tmp_path_factory.mktemp("place")
    trainings.prepare(directory, 1)
    for name, texts in (("short", ["a", "ab"]), ("long", ["abcabcabc", "xyz" * 7, "ba" * 9])):
        rows = [{"prompt": f"{name} {i} ", "completion": text} for i, text in enumerate(texts)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"data.eval": "[short.jsonl, long.jsonl]", "train.duration": "4 steps", "eval.every": "2 steps"}
    loaded = load_recipe(directory / "r.yaml", [Override(key, text) for key, text in flags.items()], cwd=directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(new_cache(directory / "cache")))
        patch.chdir(directory)
        train(loaded, LaunchOptions(), RankInfo(), QUIET)
    return directory


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(new_cache(place / "cache")))
    monkeypatch.chdir(place)


def evaluations(place: Path) -> dict[int, dict[str, Any]]:
    """The lines that the run wrote about its own evaluations, by step."""
    lines = [json.loads(line) for line in (place / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "eval"}


def scored(path: Path, recipe: Path | None = None, **flags: str) -> Score:
    trained = find_trained(path, QUIET)
    overrides = [Override(key.replace("__", "."), text) for key, text in flags.items()]
    return score(trained, load_recipe(recipe or run_recipe(trained), overrides), RankInfo(), QUIET)


def tuner(place: Path, *words: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.tuner(*words, cwd=place, stdin=stdin, code=code, **commands.QUIET)


def test_held_out_rows_that_are_not_those_of_the_run_are_refused(place: Path) -> None:
    resolved, rows = place / "runs" / "r" / "recipe.resolved.yaml", place / "short.jsonl"
    texts = resolved.read_text(), rows.read_text()
    changes = (
        (resolved, texts[0].replace("max_length: 64", "max_length: 63")),
        (rows, texts[1].replace("short 1", "short 2")),
    )
    try:
        for path, changed in changes:
            assert changed not in texts
            path.write_text(changed)
            with pytest.raises(DataError, match=r"are not those that the run had \(\w+ -> \w+\)"):
                scored(place / "runs" / "r")
            assert scored(place / "runs" / "r", data__eval="long.jsonl").rows > 0, "other rows may be asked for"
            for kept, text in zip((resolved, rows), texts, strict=True):
                kept.write_text(text)
    finally:
        for kept, text in zip((resolved, rows), texts, strict=True):
            kept.write_text(text)
    assert scored(place / "runs" / "r").evaluation.loss == evaluations(place)[4]["loss"]


def test_a_run_gives_its_own_last_loss_bit_for_bit(place: Path) -> None:
    last = evaluations(place)[4]
    done = tuner(place, "eval", "-", stdin="runs/r\n")
    assert float(done.stdout) == last["loss"]
    table = [line.split() for line in done.stderr.splitlines() if "perplexity" not in line]
    assert [row[0] for row in table[-3:]] == ["short", "long", "all"]
    assert table[-1][1] == f"{last['loss']:.4f}"
    assert set(last) == {"kind", "step", "loss", "loss/short", "loss/long", "eval_s", "samples_s"}


def test_the_document(place: Path) -> None:
    done = tuner(place, "eval", "runs/r", "r.yaml", "--data.eval", "long.jsonl", "--eval.max_rows", "2", "--json")
    document = commands.document(done)
    assert document["artifacts"]["path"] == str(place / "runs" / "r" / "checkpoints" / "step-4")
    assert float(document["artifacts"]["text"]) == document["metrics"]["loss"]
    assert (document["metrics"]["step"], document["metrics"]["rows"]) == (4, 2)
    flag = tuner(place, "eval", "runs/r", "--adapter.r", "8", "--json", code=2)
    assert "--adapter.r" in json.loads(flag.stdout)["error"]["message"]


def test_a_number_of_processes_is_refused(place: Path) -> None:
    trained = find_trained(place / "runs" / "r", QUIET)
    with pytest.raises(RecipeError, match="eval runs in one process") as refused:
        _check_flags(trained, [Override("parallel.processes", "2")])
    assert "torchrun" in str(refused.value.hint)


def test_checkpoints_and_recipes(place: Path) -> None:
    found = evaluations(place)
    steps = {path.name: scored(path) for path in (place / "runs" / "r" / "checkpoints").iterdir()}
    assert {name: result.step for name, result in steps.items()} == {"step-4": 4}
    whole = steps["step-4"].evaluation
    assert {f"loss/{name}": part.loss for name, part in whole.sources.items()} | {"loss": whole.loss} == {
        key: value for key, value in found[4].items() if key.startswith("loss")
    }
    other = scored(place / "runs" / "r", place / "r.yaml", data__eval="short.jsonl", train__micro_batch_size="1")
    assert other.evaluation.sources == {}
    assert other.evaluation.tokens == whole.sources["short"].tokens
    assert other.evaluation.loss == pytest.approx(whole.sources["short"].loss, rel=1e-6)
    flags = {"parallel__sequence": "2", "parallel__shard": "full"}  # one process has none
    assert scored(place / "runs" / "r", **flags).evaluation == whole
    split = scored(place / "runs" / "r", place / "r.yaml", data__eval="5 documents")
    assert (split.rows, split.evaluation.sources) == (5, {})


def test_hugging_face_directories(place: Path) -> None:
    found = evaluations(place)
    base = scored(place / "model", run_recipe(find_trained(place / "runs" / "r", QUIET)))
    assert (base.step, base.evaluation.line()) == (None, {k: v for k, v in found[0].items() if k.startswith("loss")})
    exported = export_hf(place / "runs" / "r", None, dtype="fp32", adapter="merge").path
    merged = scored(exported, run_recipe(find_trained(place / "runs" / "r", QUIET)))
    assert merged.evaluation.loss == pytest.approx(found[4]["loss"], rel=1e-5)
    assert merged.evaluation.loss != base.evaluation.loss


def test_what_cannot_be_evaluated(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, match in (("none", "no such directory"), ("", "neither a run")):
        with pytest.raises(RecipeError, match=match):
            find_trained(tmp_path / name, QUIET)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match="an adapter without its model"):
        find_trained(tmp_path, QUIET)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match="the run has no checkpoint"):
        find_trained(tmp_path / "run", QUIET)
    with pytest.raises(RecipeError, match="no held-out rows"):
        scored(place / "model", place / "r.yaml")
    monkeypatch.setattr("tuner.run.score.evaluate", lambda *_, **__: Evaluation(float("nan"), 3))
    with pytest.raises(DivergedError, match="the loss is nan"):
        scored(place / "runs" / "r")


@pytest.mark.multi
@pytest.mark.slow
def test_two_processes_give_the_same_loss(place: Path) -> None:
    out = launcher.run(["-m", "tuner", "eval", str(place / "runs" / "r")], 2)
    assert float(out) == pytest.approx(evaluations(place)[4]["loss"], rel=1e-6)
