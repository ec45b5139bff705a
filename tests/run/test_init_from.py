"""Whole launches with `model.init_from`: what the run directory says, and what resuming and exporting need of it; and
runs that take newer versions of the weights that they were given, and again where they were killed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.newer_versions import Change, shift, versions_appear
from tests.fixtures.tables import cases
from tests.fixtures.trainings import in_full, launch, lines, outcome, saved, trained
from tuner.api.exports import export_hf
from tuner.api.scores import evaluate
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.cli.runs import verify
from tuner.errors import DataError, RecipeError
from tuner.run.bank import ModelBank
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import resume_source
from tuner.run.verify import verify_resume
from tuner.rundir.versions import TakenVersion
from tuner.runtime.console import Console

FLAGS = {"train__duration": "2 steps", "checkpoint__every": "never"}


def second_model(workplace: Path) -> Path:
    """A model of the same kind with other weights."""
    other = shutil.copytree(workplace / "model", workplace / "other")
    tensors = load_file(other / "model.safetensors")
    moved = {name: 1.25 * tensor for name, tensor in tensors.items()}
    save_file(moved, other / "model.safetensors", {"format": "pt"})
    return other


def resumed(run: Path) -> RunResult:
    return trained(resume_source(run), "must")


def given_to(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = saved(run).meta["init_from"]
    return facts


def test_a_run_begins_from_another_and_resumes_without_it(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    in_full(workplace)
    monkeypatch.setattr(Console, "say", lambda self, label, text, level="info": said.append((label, text)))
    first = launch(workplace, name="first", **FLAGS)
    flags = {**FLAGS, "model__init_from": '["runs/first"]', "seed": "7"}
    whole = launch(workplace, name="whole", **flags)
    (line,) = [text for label, text in said if label == "init_from"]
    assert line.startswith(f"checkpoint {first.run_dir}/checkpoints/step-2, step 2: 11 of 11 weights")
    report = (whole.run_dir / "init_from.txt").read_text()
    (entry,) = given_to(whole.run_dir)["entries"]
    assert (entry["path"], entry["step"]) == (str(first.run_dir / "checkpoints" / "step-2"), 2)
    assert entry["sha256"] in report and "model.layers.0.mlp.up_proj.weight [48, 32] f32" in report
    said.clear()
    verified: Any = verify.__wrapped__([str(whole.run_dir)])  # type: ignore[attr-defined]  # what the command prints
    line = f"whole was given checkpoint {entry['path']}, step 2: 11 tensors, sha256 {entry['sha256'][:16]}"
    assert verified.artifacts["began_with"] == [line]
    stopped = launch(workplace, name="stopped", **flags, train__stop_after="1 step")
    shutil.rmtree(first.run_dir)
    again = resumed(stopped.run_dir)
    assert again.status == "finished" and outcome(again.run_dir) == outcome(whole.run_dir)
    assert given_to(again.run_dir) == given_to(whole.run_dir)
    assert sum(label == "init_from" for label, _ in said) == 1  # when the run began, and not when it was resumed


@pytest.mark.slow
def test_the_first_step_is_that_of_the_weights_given(workplace: Path) -> None:
    in_full(workplace)
    other = second_model(workplace)
    given = launch(workplace, name="given", **FLAGS, model__init_from=json.dumps([str(other)]))
    named = launch(workplace, name="named", **FLAGS, model__name_or_path=str(other))
    assert outcome(given.run_dir) == outcome(named.run_dir)


@pytest.mark.slow
def test_frozen_weights_are_given_again_and_must_be_the_same(workplace: Path) -> None:
    other = second_model(workplace)
    flags = {**FLAGS, "model__init_from": json.dumps([{"path": str(other), "load": ["self_attn"]}])}
    whole = launch(workplace, name="whole", **flags)
    assert given_to(whole.run_dir)["frozen"] == 4
    stopped = launch(workplace, name="stopped", **flags, train__stop_after="1 step")
    again = resumed(stopped.run_dir)
    assert outcome(again.run_dir) == outcome(whole.run_dir)
    exported = load_file(export_hf(whole.run_dir, dtype="fp32").path / "model.safetensors")  # compared with its probes
    base, given = (load_file(path / "model.safetensors") for path in (workplace / "model", other))
    name = "model.layers.0.self_attn.q_proj.weight"
    rank = torch.linalg.matrix_rank
    assert rank(exported[name] - given[name]) == 4 < rank(exported[name] - base[name])
    with pytest.raises(RecipeError, match=r"init_from gave the base other weights than its files hold"):
        export_hf(whole.run_dir, adapter="keep")
    stopped = launch(workplace, name="third", **flags, train__stop_after="1 step")
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, name: tensors[name] + 1}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="the base model changed since"):
        resumed(stopped.run_dir)


@pytest.mark.slow
def test_an_adapter_goes_on_in_another_run(workplace: Path) -> None:
    first = launch(workplace, name="first", **FLAGS)
    kept = export_hf(first.run_dir, adapter="keep", dtype="fp32").path
    trained = dict(read_tensors(saved(first.run_dir)))
    for source in (first.run_dir, kept):
        flags = {**FLAGS, "model__init_from": json.dumps([str(source)]), "optimizer__lr": "1e-30"}
        second = launch(workplace, name=f"after-{source.name}", **flags)
        found = saved(second.run_dir)
        assert found.meta["init_from"]["frozen"] == 0
        for name, tensor in read_tensors(found):
            if name.startswith("model/"):
                torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-20)


def test_wrong_names_are_refused_before_anything_is_written(workplace: Path) -> None:
    in_full(workplace)
    other = second_model(workplace)
    entry = {"path": str(other), "rename": {"model.norm.weight": "model.nrom.weight"}}
    for options in (LaunchOptions(), LaunchOptions(dry_run=True)):
        with pytest.raises(RecipeError, match=r"model\.nrom\.weight .* has no place") as caught:
            launch(workplace, options, **FLAGS, model__init_from=json.dumps([entry]))
        (problem,) = caught.value.problems
        assert problem.key == "model.init_from.0" and "nearest here are model.norm.weight" in problem.message
    assert not (workplace / "runs").exists()


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_sources(workplace: Path) -> None:
    other = second_model(workplace)
    launch(workplace, **FLAGS, train__stop_after="1 step")
    with pytest.raises(RecipeError, match=r"model\.init_from \[\] -> "):
        launch(workplace, "auto", **FLAGS, model__init_from=json.dumps([str(other)]))


FROZEN = {"load": ["self_attn"], "every": "2 steps"}
EMBEDDINGS = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def publish(directory: Path, number: int, change: Change = lambda tensors: tensors) -> Path:
    """Another version, with weights of its own."""
    return shift(shutil.copytree(directory / "model", directory / "versions" / f"step-{number}"), number, change)


def publish_few(directory: Path, number: int) -> Path:
    """One whose embeddings lack their last rows."""
    return publish(directory, number, lambda tensors: {**tensors, EMBEDDINGS: tensors[EMBEDDINGS][:290].clone()})


def flags(directory: Path, entry: Mapping[str, Any] = FROZEN, **others: str) -> dict[str, Any]:
    entries = json.dumps([{"path": str(directory / "versions"), **entry}])
    given = {"model__init_from": entries, "train__duration": "8 steps", "checkpoint__every": "3 steps", "name": "run"}
    more = {"checkpoint__keep": "9", "optimizer__lr": "1e-2", "data__eval": "7 documents", "eval__every": "3 steps"}
    return given | more | others


appearing = partial(versions_appear, ModelBank, publish)


def noted(run: Path) -> list[tuple[int, str]]:
    (source,) = json.loads((run / "bank.json").read_text())["sources"].values()
    return [(entry["step"], Path(entry["name"]).name) for entry in source["versions"]]


def facts(run: Path, step: int) -> tuple[str, str]:
    meta = open_checkpoint(run / "checkpoints" / f"step-{step}").meta
    return Path(meta["init_from"]["entries"][0]["path"]).name, meta["frozen_hash"]


@pytest.mark.slow
def test_a_killed_run_takes_the_same_versions_and_each_checkpoint_knows_its_own(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exports, evaluations and proofs are those of the checkpoint's step, not of the newest version."""
    publish(workplace, 10)
    with monkeypatch.context() as patch:
        appearing(workplace, patch, {2: 20, 6: 30})
        whole = launch(workplace, **flags(workplace, name="whole"))
    assert noted(whole.run_dir) == [(0, "step-10"), (2, "step-20"), (6, "step-30")]
    shutil.rmtree(workplace / "versions" / "step-30")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        shutil.rmtree(workplace / "versions" / "step-20")
        appearing(workplace, patch, {2: 20}, dies=6)
        launch(workplace, **flags(workplace))
    publish(workplace, 30)  # step 4 is taken again: its look found nothing newer, and that is final
    run = launch(workplace, "must", **flags(workplace)).run_dir
    assert noted(run) == noted(whole.run_dir) and outcome(run) == outcome(whole.run_dir)
    known = [facts(run, step) for step in (3, 6, 8)]
    assert [name for name, _ in known] == ["step-20", "step-30", "step-30"] and len({sha for _, sha in known}) == 2
    exported = load_file(export_hf(run, step=3, dtype="fp32").path / "model.safetensors")[Q_PROJ]
    given = load_file(workplace / "versions" / "step-20" / "model.safetensors")[Q_PROJ]
    assert torch.linalg.matrix_rank(exported - given) == 4  # what the adapter added
    assert verify_resume(run, 1, Console(main=False), own_process=False).from_step == 6
    publish(workplace, 40)
    for path in (workplace / "versions").glob("step-[14]0"):  # the base of no checkpoint, and one that came later
        assert verify_resume(run, 1, Console(main=False), own_process=False).from_step == 6
        shutil.rmtree(path)
    measured = {line["step"]: line["loss"] for line in lines(run) if line["kind"] == "eval"}
    for step in (3, 6):
        assert evaluate(run / "checkpoints" / f"step-{step}", quiet=True).evaluation.loss == measured[step]


@pytest.mark.slow
def test_trained_weights_are_overwritten_with_a_warning_and_frozen_rows_without(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is a source as it is. Few rows fill the first ones, and the hash is one of all. The optimizer keeps its
    moments: at a rate of next to nothing the last weights are those of the last version."""
    said, look = list[str](), ModelBank.look
    in_full(workplace)
    source = launch(workplace, name="source", train__duration="4 steps", checkpoint__every="3 steps").run_dir
    for number in (10, 20):
        publish_few(workplace, number)
    later = {0: source / "checkpoints" / "step-4", 1: workplace / "versions" / "step-20"}
    held = {number: path.rename(workplace / path.name) for number, path in later.items()}

    def looked(self: ModelBank, number: int, step: int, say: Any) -> TakenVersion:
        if step == 4 - 2 * number:
            held[number].rename(later[number])
        return look(self, number, step, say)

    monkeypatch.setattr(ModelBank, "look", looked)
    monkeypatch.setattr(Console, "warn", lambda self, text: said.append(text))
    entries = [
        {"path": str(source), "load": ["mlp"], "every": "2 steps"},
        {"path": str(workplace / "versions"), "load": ["embed_tokens"], "grow": True, "every": "1 step"},
    ]
    more = {"model__freeze": '["embed_tokens"]', "optimizer__lr": "1e-30"}
    own = flags(workplace, model__init_from=json.dumps(entries), **more)
    launch(workplace, **own, train__stop_after="3 steps")
    run = launch(workplace, "must", **own).run_dir
    warnings = [text.partition(" of the")[0] for text in said if "init_from" in text]  # one a launch
    assert warnings == 2 * ["model.init_from.0: newer versions overwrite what was trained of 3"]
    sources = json.loads((run / "bank.json").read_text())["sources"]
    names = {number: [Path(each["name"]).name for each in one["versions"]] for number, one in sources.items()}
    assert names == {"0": ["step-3", "step-4"], "1": ["step-10", "step-20"]}
    exported = load_file(export_hf(run, dtype="fp32").path / "model.safetensors")
    base, few = (load_file(path / "model.safetensors") for path in (workplace / "model", later[1]))
    given = {name.removeprefix("model/"): tensor for name, tensor in read_tensors(open_checkpoint(later[0]))}
    assert torch.equal(exported[EMBEDDINGS], torch.cat([few[EMBEDDINGS], base[EMBEDDINGS][290:]]))
    for name in base.keys() - {EMBEDDINGS}:
        assert torch.equal(exported[name], (given if "mlp" in name else base)[name]), name


def test_versions_that_are_gone_changed_or_others_are_refused_by_name(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str) -> str | None:
        with pytest.raises(DataError, match=says) as error:
            launch(workplace, "must", **flags(workplace))
        return error.value.hint

    publish(workplace, 10)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        appearing(workplace, patch, {2: 20}, dies=4)
        launch(workplace, **flags(workplace, checkpoint__every="1 step"))
    run, second = workplace / "runs" / "run", workplace / "versions" / "step-20"
    for step, says in ((3, "the base model changed"), (2, "step-20 changed since it gave the run weights after")):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")  # the last one left is that of step 2, and then that of 1
        shutil.rmtree(second)
        refused("step-20 is gone, which the run took after step 2")
        publish(workplace, 20, lambda tensors: {**tensors, Q_PROJ: tensors[Q_PROJ] + 2})
        assert str(second) in str(refused(says)) or step == 2
    shutil.rmtree(second)
    publish(workplace, 20)
    publish(workplace, 30, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != Q_PROJ})
    refused("step-30 has other tensors than .*step-20 before it")
    shutil.rmtree(second.with_name("step-30"))
    os.truncate(publish(workplace, 40) / "model.safetensors", 9000)
    run = launch(workplace, "must", **flags(workplace, logging__level="info")).run_dir
    assert noted(run) == [(0, "step-10"), (2, "step-20")]
    assert "step-40 is passed over" in (run / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(("entries", "others", "says"), cases(__file__, "what_cannot_be_taken_again_is_refused"))
def test_what_cannot_be_taken_again_is_refused(
    workplace: Path, entries: list[Any], others: Mapping[str, str], says: str
) -> None:
    publish(workplace, 10)
    with pytest.raises(RecipeError, match=says):
        launch(workplace, **flags(workplace, model__init_from=json.dumps(entries), **others))


def test_an_adapter_that_is_merged_cannot_be_taken_again(workplace: Path) -> None:
    kept = export_hf(launch(workplace, name="first", train__duration="1 step").run_dir, adapter="keep").path
    shutil.move(kept, workplace / "versions" / "step-1")
    with pytest.raises(RecipeError, match=r"adds an adapter to .*, which cannot be taken away again"):
        launch(workplace, **flags(workplace, {"adapter": "merge", "every": "2 steps"}))


@pytest.mark.slow
def test_versions_come_at_the_bounds_of_windows(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        rows = (workplace / "rows.jsonl").read_text().splitlines(keepends=True)[8 * number : 8 * number + 8]
        (workplace / f"w{number}.jsonl").write_text("".join(rows) * (number + 1))  # 1, 2, 3 and 4 steps
    publish(workplace, 10)
    appearing(workplace, monkeypatch, {3: 20, 10: 30})
    windows = {"data__train": "w{window}.jsonl", "data__windows__names": '["0", "1", "2", "3"]', "data__eval": "null"}
    windows |= {"eval__every": "never", "schedule__kind": "constant", "schedule__warmup": "1 step"}
    own = flags(workplace, {**FROZEN, "every": "2 windows"}, **windows, train__duration="1 epoch")
    run = launch(workplace, **own).run_dir
    assert noted(run) == [(0, "step-10"), (3, "step-20"), (10, "step-30")]
