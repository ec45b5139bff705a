"""What is settled once for all ranks: by prediction where there is a CUDA device, or as a resumed run had it."""

import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.processes import fork, wait
from tests.profile.test_predict import wish
from tuner.config.load import LoadedRecipe, Override, load_recipe, recipe_dict
from tuner.errors import RecipeError
from tuner.profile import choose, devices
from tuner.run import settle as module
from tuner.run.launch import launch
from tuner.run.options import HandedOver, LaunchOptions
from tuner.run.settle import LaunchData, answer_of, run_before, settle
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank, from_rank0, gloo_group, process_group
from tuner.setup import settled as keys
from tuner.setup.settled import BATCH, LEVEL, MICRO, OFFLOAD, SHARD, TILED, Settled

TWO = RankInfo(0, 2, 0, 2)
OFF = {"tiled_mlp": False, "offload_activations": False}
MORE = {TILED: False, OFFLOAD: False}


def loaded_from(directory: Path, **sections: dict[str, Any]) -> LoadedRecipe:
    recipe = wish(directory, **sections)
    return LoadedRecipe(recipe, None, directory, "", {BATCH: "r.yaml:1:1"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A machine with a CUDA device, and every job of predicting, here or in a process of its own."""
    jobs: list[dict[str, Any]] = []

    def answered(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(json.loads(json.dumps(job)))
        return {"values": {MICRO: 4, LEVEL: "full"}, "reasons": {MICRO: "room", LEVEL: "no room"}}

    monkeypatch.setattr(module, "on_cuda", lambda device: device != "cpu")
    for name in ("_asked", "_answered"):
        monkeypatch.setattr(module, name, answered)
    return jobs


def test_only_what_is_left_open_is_predicted_and_never_for_a_cpu(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    place, console = LaunchData(tmp_path / "data", tmp_path / "cache"), Console(main=False)
    found = settle(loaded_from(tmp_path), {}, RankInfo(), place, console)
    assert found == Settled({MICRO: 4, LEVEL: "full"}, {MICRO: "room", LEVEL: "no room"})
    assert asked[0]["data"] == str(tmp_path / "data") and asked[0]["recipe"]["train"]["micro_batch_size"] == "auto"
    cpu = loaded_from(tmp_path, train={"device": "cpu"})
    assert settle(cpu, {}, TWO, place, console) == Settled()
    assert settle(cpu, {MICRO: 1, LEVEL: "none"}, RankInfo(), place, console) == Settled()
    written = loaded_from(tmp_path, train={"micro_batch_size": 1, "gradient_checkpointing": "none", **OFF})
    assert settle(written, {}, RankInfo(), place, console) == Settled()
    assert keys.left_open(written.recipe, 2) == (SHARD,)
    assert settle(written, {}, TWO, place, console) == Settled()  # on one machine weights in full are sharded over all
    assert len(asked) == 1


def test_a_resumed_run_keeps_what_it_had(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    place, console = LaunchData(tmp_path, tmp_path), Console(main=False)
    launches = [{"world_size": 2, "settled": {SHARD: "none", MICRO: 2}}, {"world_size": 4, "settled": {SHARD: "full"}}]
    record = {"launches": launches}
    run = loaded_from(tmp_path, train={"micro_batch_size": 2, "gradient_checkpointing": "selective", **OFF})
    before = run_before(run, record, 2)
    assert before == {MICRO: 2, LEVEL: "selective", **MORE, SHARD: "none"}
    assert keys.meaningful({TILED: True, OFFLOAD: 1, MICRO: True}) == {TILED: True}
    assert run_before(run, record, 8) == {MICRO: 2, LEVEL: "selective", **MORE} and run_before(None, None, 1) == {}
    found = settle(loaded_from(tmp_path), before, TWO, place, console)
    assert found.values == before and set(found.reasons.values()) == {"as the run had it"} and not asked
    settle(loaded_from(tmp_path), run_before(run, record, 8), RankInfo(0, 8, 0, 8), place, console)
    assert asked[0]["recipe"]["train"]["micro_batch_size"] == "auto"  # 2 rows on 8 processes do not divide 8
    assert asked[0]["recipe"]["train"]["gradient_checkpointing"] == "selective"
    assert keys.reopened(record, run, 8).recipe.train.micro_batch_size == "auto"
    assert keys.reopened(record, run, 4) is run and keys.reopened({"launches": [{}]}, run, 8) is run


@pytest.mark.parametrize(("processes", "rows"), [(3, 15), (5, 15), (6, 18), (7, 14), (32, 32)])
def test_the_default_batch_gives_way_to_one_that_divides(tmp_path: Path, processes: int, rows: int) -> None:
    default = replace(loaded_from(tmp_path, train={"global_batch_size": 16}), origins={})
    found = keys.whole_batches(default, processes)
    assert found.values == {BATCH: rows}
    assert found.reasons[BATCH] == f"the default of 16 rows does not divide into {processes} processes"
    assert keys.whole_batches(replace(default, origins={BATCH: "r.yaml:3:3"}), processes) == Settled()
    assert keys.whole_batches(default, 8) == Settled()
    record = {"launches": [{"settled": dict(found.values)}, {}]}
    assert keys.with_batch_of(record, default).recipe.train.global_batch_size == rows
    assert keys.with_batch_of({"launches": [{}]}, default) is default
    for odd in ({BATCH: "many"}, {BATCH: True}, {BATCH: 0}, [BATCH], "x"):
        assert keys.with_batch_of({"launches": [{"settled": odd}]}, default) is default


def test_a_choice_is_made_once_for_the_same_recipe_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = devices.find_device("rtx4090-24g")
    monkeypatch.setattr(devices, "present_device", lambda kind: card)
    chosen: list[Path] = []

    takes = SimpleNamespace(host_bytes=3 << 30)

    def choosing(recipe: Any, target: Any, prepared: Path) -> tuple[Settled, Any]:
        assert target.limit_bytes % (128 << 20) == 0 and card.memory_bytes - target.limit_bytes < 128 << 20
        chosen.append(prepared)
        values = {MICRO: 2, LEVEL: "none", **MORE}
        return Settled(values, dict.fromkeys(values, "room")), takes

    monkeypatch.setattr(choose, "choose", choosing)
    ranks = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    job = {"recipe": recipe_dict(wish(tmp_path)), "ranks": ranks, "data": "/d/abc", "cache": str(tmp_path / "c")}
    values = {MICRO: 2, LEVEL: "none", **MORE}
    answer = {"values": values, "reasons": dict.fromkeys(values, "room")}
    assert answer_of(job) == answer_of(job) == answer
    assert chosen == [Path("/d/abc")]
    answer_of({**job, "recipe": recipe_dict(wish(tmp_path, train={"duration": "7 steps"}))})
    assert len(chosen) == 1
    answer_of({**job, "recipe": recipe_dict(wish(tmp_path, adapter={"kind": "lora"}))})
    answer_of({**job, "data": "/d/other"})
    assert len(chosen) == 3
    before = [(card.host_bytes - (5 << 30), 0), (6 << 30, 0), (5 << 30, 1), (card.host_bytes, 1), (7 << 30, 0)]
    for free, again in before:
        monkeypatch.setattr(devices, "present_device", lambda kind, free=free: replace(card, host_bytes=free))
        count = len(chosen)
        assert answer_of(job) == answer
        assert len(chosen) == count + again, f"{free >> 30} GiB of the host are free"
    monkeypatch.setattr(devices, "present_device", lambda kind: card)
    for damage in ("{", '{"values": {"train.micro_batch_size": -1, "train.gradient_checkpointing": "none"}}', "[]"):
        for kept in (tmp_path / "c" / "choices").iterdir():
            kept.write_text(damage)
        count = len(chosen)
        assert answer_of(job) == answer and len(chosen) == count + 1


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("starts", [False, True], ids=["here", "in a process of its own"])
def test_what_cannot_be_predicted_is_taken_plainly_with_the_reason(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = subprocess.run
    begun: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: begun.append(given) or run(*given, **named))
    monkeypatch.setattr(module, "on_cuda", lambda device: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    place = LaunchData(tmp_path, tmp_path, starts=starts)
    found = settle(loaded_from(tmp_path), {}, RankInfo(), place, Console(level="warning"))
    assert found.values == {MICRO: 1, LEVEL: "none", **MORE}
    assert len(begun) == starts
    why = "train.device is cuda, but torch finds no CUDA device"
    assert set(found.reasons.values()) == {f"not predicted: {why}"}
    assert f"memory cannot be predicted: {why}" in capfd.readouterr().err


def test_other_ranks_get_what_rank_0_finds_before_they_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)

    def work(rank: int) -> None:
        ranks = RankInfo(rank, 2, rank, 2)
        asked: list[int] = []
        answer = from_rank0(ranks, 20, "settled", lambda: asked.append(rank) or f"of {rank}")
        assert answer == "of 0" and asked == [0] * (rank == 0)
        with process_group(ranks, "cpu", 20):  # rank 0 hosts the meeting, which it can do once
            assert any_rank(rank == 1, gloo_group())
        os._exit(0)

    children = [fork(lambda rank=rank: work(rank)) for rank in range(2)]  # type: ignore[misc]
    assert [wait(child) for child in children] == [0, 0]
    assert from_rank0(RankInfo(), 1, "settled", lambda: "mine") == "mine"


def test_what_was_settled_is_written_down_with_its_reason_and_kept(tmp_path: Path) -> None:
    trainings.edit(trainings.prepare(tmp_path, 1), (", micro_batch_size: 4", ""), ("3 epochs", "4 steps"))
    settled = Settled({MICRO: 4, LEVEL: "full"}, {MICRO: "room for\n4", LEVEL: "no room"})
    found = trainings.launch(tmp_path, train__stop_after="2 steps")
    prepared = next((Path(os.environ["TUNER_CACHE"]) / "prepared").glob("[0-9a-f]*"))
    given = HandedOver(prepared, None, (), settled)
    run = trainings.launch(tmp_path, LaunchOptions(handed_over=given), name="p", train__stop_after="2 steps").run_dir
    resolved = (run / "recipe.resolved.yaml").read_text()
    assert "  micro_batch_size: 4  # auto: room for 4\n" in resolved
    assert "  gradient_checkpointing: full  # auto: no room\n" in resolved
    assert "  shard: auto  # full here, auto: one machine\n" in resolved
    plain = (found.run_dir / "recipe.resolved.yaml").read_text()
    assert "  micro_batch_size: 1  # auto: cpu\n" in plain and "  gradient_checkpointing: none  # auto: cpu\n" in plain
    record = trainings.record(run)
    assert record["launches"][0]["settled"] == {MICRO: 4, LEVEL: "full"}
    assert "settled" not in trainings.record(found.run_dir)["launches"][0]
    assert trainings.launch(tmp_path, "must", name="p").status == "finished"
    again = trainings.record(run)["launches"][1]
    assert again["settled"] == {MICRO: 4, LEVEL: "full"}
    assert load_recipe(run / "recipe.resolved.yaml").recipe.train.micro_batch_size == 4


def test_the_default_recipe_starts_on_three_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left_open = (", micro_batch_size: 4", ""), (" global_batch_size: 8,", "")
    trainings.edit(trainings.prepare(tmp_path, 1), *left_open, ("warning", "info"))
    three = [Override("parallel.processes", "3")]
    planned = launch(load_recipe(tmp_path / "r.yaml", three), LaunchOptions(dry_run=True))
    assert planned.status == "planned"
    said = capfd.readouterr().err
    assert "train.global_batch_size 15: the default of 16 rows does not divide into 3 processes" in said
    written = load_recipe(tmp_path / "r.yaml", [*three, Override("train.global_batch_size", "16")])
    with pytest.raises(RecipeError, match="16 rows do not divide into 3 processes of 1 rows"):
        launch(written, LaunchOptions(dry_run=True))


def test_who_starts_ranks_settles_for_them_and_meets_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not LaunchData.of(tmp_path, tmp_path, False).is_shared
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert LaunchData.of(tmp_path, tmp_path, False).is_shared and not LaunchData.of(tmp_path, tmp_path, True).is_shared
