"""What a launch looks at before it trains: a run that is finished is told so before torch is loaded, ranks that each
look for the checkpoint to continue from, and a tokenizer that has no more ids than the model.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from tests.checkpoint.states import full_state
from tests.data import tiny
from tests.fixtures import forked, trainings
from tests.fixtures.processes import run_ranks
from tests.fixtures.trainings import launch
from tuner.checkpoint import open as opening
from tuner.checkpoint.manifest import sealed
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.load import LoadedRecipe, Override
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import DataError, RecipeError
from tuner.model import read_ahead
from tuner.model.build import ModelSpec, fetch_weights
from tuner.run import main
from tuner.run import preflight as preflight_module
from tuner.run import status as status_module
from tuner.run.changes import parse_reset
from tuner.run.options import LaunchOptions
from tuner.run.parts.part import Preflight
from tuner.run.preflight import preflight
from tuner.run.status import RunStatus, agreed_status, resume_source, status_of
from tuner.rundir.directory import RunDir
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective, gloo_group
from tuner.setup import announce
from tuner.setup.resolve import check_fits, resolve


@pytest.mark.multi
def test_every_rank_takes_the_checkpoint_of_rank_0_or_none_does(tmp_path: Path) -> None:
    run = CheckpointDir(tmp_path / "checkpoints", "r")
    state = {"guard": {"skipped": 0}}
    first, second = (save(run, step, full_state(step), {"step": step, **state}, {}) for step in (1, 2))

    def work(rank: int) -> None:
        ranks = Collective(gloo_group())
        found = open_checkpoint(second if rank else first)
        status = RunStatus(RunDir(tmp_path), {}, found, ())
        mine = agreed_status(status, ranks)
        assert mine.checkpoint is not None
        assert mine.checkpoint.path == first
        assert agreed_status(replace(status, checkpoint=None), ranks).checkpoint is None
        lone = replace(status, checkpoint=None if rank else found)
        assert agreed_status(lone, ranks).checkpoint.path == first  # type: ignore[union-attr]
        changed = replace(found, path=first, manifest=sealed({**found.manifest, "schema": 9}))
        if rank:
            status_module.open_checkpoint = lambda path, verify: changed
        with pytest.raises(DataError, match="rank 1: .*another manifest than rank 0 reads there"):
            agreed_status(status, ranks)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_tensors_are_hashed_by_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings.prepare(tmp_path, 1)
    stopped = launch(tmp_path, train__stop_after="1 step")
    hashed: list[Path] = []
    real = opening.verify_shard

    def counting(path: Path, *rest: Any) -> None:
        hashed.append(path)
        real(path, *rest)

    monkeypatch.setattr(opening, "verify_shard", counting)
    loaded = trainings.loaded(tmp_path)
    for hashes, wanted in ((False, 0), (True, 1)):
        hashed.clear()
        ready = preflight(loaded, LaunchOptions("auto"), Console(main=False), hashes=hashes)
        assert isinstance(ready, Preflight)
        assert ready.status.checkpoint is not None
        assert ready.status.checkpoint.path == stopped.checkpoint
        assert len(hashed) == wanted
    record = trainings.record(stopped.run_dir)
    assert ready.status.record == record


def test_the_plan_counts_what_is_trained(tmp_path: Path) -> None:
    trainings.in_full(trainings.prepare(tmp_path, 1))

    def trained(**flags: str) -> str:
        return announce._trained(resolve(trainings.loaded(tmp_path, **flags).recipe, 64, RankInfo()))

    def size(count: int) -> str:
        return f"{count:,} trained ({count / whole:.2%})"

    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # of queries and outputs, keys and values, the MLP, norms
    whole = 300 * 32 + 2 * layer + 32
    assert trained() == "all trained"
    assert trained(model__freeze="[mlp]") == f"{size(whole - 2 * 3 * 32 * 48)}, all but mlp"
    low_rank = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert trained(adapter__kind="lora", adapter__r="2") == f"{size(low_rank)}: lora, r 2"
    with pytest.raises(RecipeError, match="'q_projj' matches nothing"):
        trained(adapter__kind="lora", adapter__target_modules="[q_projj]")


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_fetched_in_the_files_that_are_loaded(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def one(name: str, file: str, revision: str | None) -> str:
        asked.append(file)
        if sharded and file == "model.safetensors":
            raise EntryNotFoundError("404")
        return str(tmp_path / file)

    def several(name: str, revision: str | None, allow_patterns: list[str]) -> None:
        asked.extend(allow_patterns)

    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", several)
    fetch_weights(ModelSpec("owner/name"))
    assert asked == [], "without the network nothing is asked for"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    fetch_weights(ModelSpec("owner/name", random_init=True))
    fetch_weights(ModelSpec(str(tmp_path)))
    assert asked == []
    fetch_weights(ModelSpec("owner/name", "v1"))
    rest = ["model.safetensors.index.json", *shards] if sharded else []
    assert asked == ["model.safetensors", *rest]


def test_weights_and_data_are_there_before_the_processes_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings.prepare(tmp_path, 1)
    done: list[str] = []

    def noting(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in [
        (preflight_module, "fetch_weights"), (preflight_module, "prepare_to_use"), (main, "joined"),
    ]:  # fmt: skip
        noting(module, name)
    launch(tmp_path, LaunchOptions(dry_run=True))
    assert done == ["prepare_to_use"], "a plan downloads no weights"
    launch(tmp_path, train__stop_after="1 step")
    assert done[1:] == ["fetch_weights", "prepare_to_use", "joined"]


@pytest.mark.parametrize(
    ("no_cxx", "no_cc", "said"),
    [
        (None, None, None),
        ("no g++", None, "no g++: the decoder layers are not compiled; slower"),
        ("no gcc", "no gcc", "no gcc: the decoder layers are not compiled and liger's kernels are not used; slower"),
    ],
)
def test_what_a_machine_lacks_for_a_gpu_is_named(
    no_cxx: str | None, no_cc: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "compiler_problem", lambda kind: no_cxx)
    monkeypatch.setattr(announce, "triton_problem", lambda: no_cc)
    reasons = {"train.compile": no_cxx or "cuda", "model.kernels": f"no liger: {no_cc}" if no_cc else "llama on cuda"}

    def resolved_on(kind: str) -> Any:
        return SimpleNamespace(facts=SimpleNamespace(kind=kind), reasons=reasons)

    found = announce._slower(resolved_on("cuda"))
    assert found is said or (found is not None and said is not None and found.startswith(said))
    assert announce._slower(resolved_on("cpu")) is None


def test_weights_for_a_gpu_are_read_while_the_run_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings.prepare(tmp_path, 1)
    read: list[ModelSpec] = []
    monkeypatch.setattr(read_ahead, "begin_reading", read.append)
    launch(tmp_path, LaunchOptions(dry_run=True))
    launch(tmp_path, train__stop_after="1 step", output_dir="on-a-cpu")
    assert not read
    monkeypatch.setattr(preflight_module, "on_cuda", lambda device: True)
    launch(tmp_path, LaunchOptions(dry_run=True))
    assert not read
    launch(tmp_path, train__stop_after="1 step", output_dir="on-a-gpu")
    assert [Path(spec.name_or_path).name for spec in read] == ["model"]


QUIET = Console(main=False)
CODE = """
import sys
from pathlib import Path
from tuner.run.options import LaunchOptions
from tuner.run.status import resume_source, status_of
from tuner.runtime.console import Console
found = status_of(resume_source(Path(sys.argv[1])), LaunchOptions("must"), Console()).finished
print(found.step, "torch" in sys.modules)
"""


def warned_of(loaded: LoadedRecipe, options: LaunchOptions, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert status_of(loaded, options, Console()).finished is not None
    return capsys.readouterr().err


def test_a_finished_run_is_told_without_torch(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workplace / "runs" / "r"
    launch(workplace, train__duration="2 steps", train__stop_after="1 step")
    assert status_of(resume_source(run), LaunchOptions("must"), QUIET).finished is None
    with pytest.raises(RecipeError, match="another recipe"):
        status_of(resume_source(run, [Override("optimizer.lr", "1e-9")]), LaunchOptions("must"), QUIET)
    ended = launch(workplace, "must", train__duration="2 steps")
    loaded, must = resume_source(run), LaunchOptions("must")
    assert status_of(loaded, must, QUIET).finished == ended == launch(workplace, train__duration="2 steps")
    assert status_of(loaded, LaunchOptions("must", reset=("schedule",)), QUIET).finished is None
    with pytest.raises(RecipeError, match="did not begin from"):
        status_of(loaded, LaunchOptions(run), QUIET)
    longer = resume_source(run, [Override("train.duration", "3 steps")])
    with pytest.raises(RecipeError, match="train.duration 2 steps -> 3 steps") as refused:
        status_of(longer, must, QUIET)
    hint = f"change it in this run: add --reset schedule      start another run: tuner train {workplace / 'r.yaml'} "
    assert (refused.value.hint or "").startswith(hint)
    with pytest.raises(RecipeError) as refused:
        launch(workplace, train__duration="3 steps")
    assert refused.value.hint == (
        "change it in this run: add --resume must --reset schedule      start another run: --name NEW-NAME"
    )

    rows = Path(loaded.recipe.data.train[0].path)
    before = rows.stat()
    assert "modified after" not in warned_of(loaded, must, capsys)
    os.utime(rows, (before.st_atime, before.st_mtime + 3600))
    assert f"{rows}: modified after this run started; what changed since is not trained on." in " ".join(
        warned_of(loaded, must, capsys).split()
    )
    text = rows.read_bytes()
    rows.write_bytes(text + text.splitlines(keepends=True)[0].replace(b"a", b"b"))
    with pytest.raises(DataError, match=f"the data of {rows} changed since this checkpoint was saved") as changed:
        launch(workplace, LaunchOptions("must", reset=parse_reset("schedule")), train__duration="3 steps")
    assert "--reset schedule,data;" in (changed.value.hint or "")
    rows.write_bytes(text)
    os.utime(rows, (before.st_atime, before.st_mtime))

    command = [sys.executable, "-c", CODE, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(forked.ROOT)})
    assert done.stdout == "2 False\n"
    assert "is already trained: 2 steps" in done.stderr

    shard = next((run / "checkpoints" / "step-2").glob("rank-*"))
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    shard.write_bytes(data)
    assert status_of(loaded, must, QUIET).finished is None, "a flipped bit: trained again"
    shard.write_bytes(whole)
    again = LaunchOptions("must", reset=parse_reset("schedule"))
    assert launch(workplace, again, train__duration="3 steps").step == 3, "what the hint says does it"


def test_a_checkpoint_that_could_not_be_restored_is_still_the_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be by another version of the model's code; the version that wrote it reads it."""
    from tuner.run import main
    from tuner.rundir.model_path import find_checkpoint, ignore_warning

    run = launch(workplace, name="kept", train__stop_after="2 steps").run_dir

    def unfit(*given: object) -> None:
        raise DataError("does not hold this model's state")

    with monkeypatch.context() as patch, pytest.raises(DataError, match="does not hold"):
        patch.setattr(main, "restore", unfit)
        launch(workplace, "must", name="kept")
    found = find_checkpoint(run, ignore_warning)
    assert found is not None and found.checkpoint.step == 2
    assert launch(workplace, "must", name="kept", train__stop_after="1 step").step == 3


def test_tokens_beyond_the_embeddings_are_named(tmp_path: Path) -> None:
    """transformers adds a padding token that only tokenizer_config.json names: readers would pad with its id."""
    size = tiny.tokenizer().vocab_size
    text = SimpleNamespace(vocab_size=size, max_position_embeddings=None)
    config: Any = SimpleNamespace(get_text_config=lambda: text)
    prepared: Any = None
    base = tiny.write_directory(tmp_path, pad_token="<pad>")  # noqa: S106 (a token of a tokenizer)
    tokenizer = load_tokenizer(str(base), None, TokenizerSection())
    words = rf"{size + 1:,} ids are more than the model's {size:,} embeddings \(<pad>\)"
    with pytest.raises(RecipeError, match=words) as found:
        check_fits(tokenizer, config, prepared)
    assert found.value.hint == "name a pad_token in tokenizer_config.json that the model has, such as its eos_token"
    text.vocab_size = size + 1
    check_fits(tokenizer, config, prepared)
