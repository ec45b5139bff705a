"""The choice is the fastest of what fits, at the same tokens a step; a pipe carries it into training.

What becomes of an `auto` of memory on a CUDA device: the least recomputing and the most rows that fit and pay.
"""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixtures import forked
from tests.fixtures.commands import tuner
from tests.model.tiny import tiny_config
from tests.profile.test_measure import recipe  # noqa: F401 - a fixture
from tests.profile.test_predict import foreseen, predicted, wish
from tuner.errors import MemoryLimitError
from tuner.model.build import meta_model
from tuner.profile import choose as choosing
from tuner.profile import fit as fitting
from tuner.profile import search
from tuner.profile.choose import choose
from tuner.profile.devices import find_device
from tuner.profile.fit import fit
from tuner.profile.predict import Target
from tuner.profile.prediction import PARTS, MemoryMoment, MemoryTimeline, Part, Prediction, TimeEstimate
from tuner.profile.report import sentence, table
from tuner.profile.search import Choice
from tuner.profile.watch import OomReport, with_fix
from tuner.runtime.device import DeviceFacts
from tuner.runtime.dist import RankInfo
from tuner.setup.settled import LEVEL, MICRO, SHARD, Settled, changed, rows_at_once, value_of

ROOMY = 16 << 30


def fitted(
    directory: Path, limit: int, processes: int = 1, device: str = "cpu", **sections: dict[str, Any]
) -> list[Choice]:
    sections["train"] = {"micro_batch_size": 1, "gradient_checkpointing": "none", **sections.get("train", {})}
    target = Target(find_device(device), RankInfo(0, processes, 0, processes), limit)
    return fit(wish(directory, **sections), target).choices


@pytest.mark.slow
def test_where_nothing_fits_the_closest_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="nothing fits in 1.0 MiB") as caught:
        fitted(tmp_path, 1 << 20)
    assert caught.value.exit_code == 5


@pytest.mark.slow
def test_where_predictions_are_unverified_the_closest_is_found(tmp_path: Path) -> None:
    target = Target(find_device("rtx4090-24g"), RankInfo(), 1 << 20)
    found = fit(wish(tmp_path), target).choices
    assert len(found) == 1 and not found[0].fits and found[0].prediction.warnings


@pytest.mark.slow
def test_shorter_rows_keep_the_tokens_of_a_step(tmp_path: Path) -> None:
    model = {"config": {"max_position_embeddings": 1024}}
    again = {"gradient_checkpointing": "full"}
    short = {"data": {"max_length": 512}, "train": {**again, "global_batch_size": 16}, "model": model}
    limit = round(predicted(wish(tmp_path, **short)).peak_bytes * 1.02) + 1000
    found = fitted(tmp_path, limit, data={"max_length": 1024}, train=again, model=model)
    best = found[0].overrides
    assert best["data.max_length"] < 1024
    assert best["data.max_length"] * best["train.global_batch_size"] == 1024 * 8


@pytest.mark.slow
def test_ways_of_sharding_are_tried_with_several_processes(tmp_path: Path) -> None:
    found = fitted(tmp_path, ROOMY, processes=4, device="h100-80g")  # where copies are faster than shards
    assert {choice.overrides.get("parallel.shard") for choice in found} == {"full", "none"}
    assert all(8 % (4 * choice.overrides.get("train.micro_batch_size", 1)) == 0 for choice in found)


def test_words() -> None:
    said = foreseen(processes="2x2")
    assert sentence(said).startswith("peak ") and "in each of 4 processes" in sentence(said)
    assert "fits in 16.00 GiB" in sentence(said) and "roughly" in sentence(said)
    lines = table(said)
    assert lines[0][:2] == ["MiB", "peak"] and lines[-1][0] == "total"
    assert {"weights", "gathered weights", "process"} <= {line[0] for line in lines}


def piped(where: Path, limit: str, *flags: str) -> subprocess.CompletedProcess[str]:
    with forked.as_words() as (words, handle):
        python = f"{shlex.join(words)} -m tuner"
        line = f"set -o pipefail; {python} profile r.yaml --fit {limit} --json | {python} train r.yaml --overrides - "
        command = ["bash", "-c", line + " ".join(flags)]
        return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, pass_fds=[handle])


def test_the_choice_is_piped_into_training(recipe: Path) -> None:  # noqa: F811
    where = recipe.parent
    done = piped(where, "16GiB", "--train.duration", "'1 steps'", "--train.gradient_checkpointing", "full")
    assert done.returncode == 0, done.stderr
    resolved = (where / "runs/r/recipe.resolved.yaml").read_text()
    assert "micro_batch_size: 4" in resolved and "gradient_checkpointing: full" in resolved
    first = tuner("profile", "r.yaml", "--fit", "much", "--json", cwd=where)
    assert first.returncode == 2  # what a shell with pipefail says
    failed = tuner("train", "r.yaml", "--overrides", "-", "--json", "--name", "other", cwd=where, stdin=first.stdout)
    document = json.loads(failed.stdout)
    assert failed.returncode == document["exit_code"] == 2 and document["command"] == "profile"
    assert not (where / "runs/other").exists()


def test_an_answer_is_kept_for_the_same_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wished, target = wish(tmp_path), Target(find_device("h100-80g"), RankInfo(), 1 << 34)
    key = fitting.key_of(wished, target)
    flags = "--train.micro_batch_size 2"
    answer = fitting.KeptAnswer([["", "peak"]], flags, {"verdict": "fits"}, [], {MICRO: 2}, 3, 1.5)
    assert fitting.known(key, wished) is None
    fitting.keep(key, wished, answer)
    assert fitting.known(key, wished) == answer
    assert fitting.key_of(wished.model_copy(update={"name": "other"}), target) == key
    monkeypatch.setattr(fitting, "source_hash", lambda parts: "other")
    others = [fitting.key_of(wished, target)]
    monkeypatch.undo()
    others += [fitting.key_of(changed(wished, {"data.max_length": 128}), target)]
    others += [fitting.key_of(wished, replace(target, limit_bytes=1 << 33))]
    assert key not in others and len(set(others)) == 3


@pytest.mark.slow
def test_prediction_and_choice_as_documents(recipe: Path) -> None:  # noqa: F811
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = tuner("profile", str(recipe), "--json", *arguments, cwd=recipe.parent)
        return done.returncode, json.loads(done.stdout)

    code, document = run("--device", "h100-80g", "--processes", "2", "--train.precision", "bf16")
    assert code == 0 and document["metrics"]["verdict"] == "fits" and document["metrics"]["processes"] == 2
    assert document["metrics"]["memory"]["peak"]["parts"]["parameters"] > 0
    code, document = run("--device", "h100-80g", "--memory", "600MiB", "--output", "page")
    assert code == 0 and document["metrics"]["verdict"] == "does not fit" and not document["metrics"]["verified"]
    assert any("unverified" in warning for warning in document["warnings"])
    assert json.loads((recipe.parent / "page" / "report.json").read_text())["predicted"]["verified"] is False
    assert run("--measure", "1", "--processes", "2")[0] == 2
    first, again = run("--fit", "16GiB"), run("--fit", "16GiB")
    assert again[1]["metrics"].pop("searched_s") == 0 < first[1]["metrics"].pop("searched_s")
    assert first == again


CARD, GIB = "rtx4090-24g", 1 << 30
OFF = {"train.tiled_mlp": False, "train.offload_activations": False}
LONG: dict[str, Any] = {"data": {"max_length": 2048}, "model": {"config": {"max_position_embeddings": 2048}}}
STATE, KEPT = 8, {"none": 4, "selective": 3, "full": 1}
"""GiB of weights and their state, and of the activations of a row."""


class Counted:
    """Stands in for predictions: memory that is simple to add up; every recipe that was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.broken: set[str] = set()
        self.saved: dict[str, int] = {}

    def __call__(self, asked: Any, target: Target, *_: Any) -> Prediction:
        rows, level, kind = rows_at_once(asked.train), asked.train.gradient_checkpointing, asked.parallel.shard
        self.asked.append((kind, level, rows))
        if level in self.broken:
            raise ValueError(f"no {level}")
        ranks = target.rank_info
        shards = {"none": 1, "hybrid": ranks.local_world_size}.get(kind, ranks.world_size)
        parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        less = sum(size for key, size in self.saved.items() if value_of(asked, key) is True)
        parts |= {"parameters": STATE * GIB // shards, "activations": (rows * KEPT[level] - less) * GIB}
        memory = MemoryTimeline((MemoryMoment("backward", "", parts),), {})
        time = TimeEstimate({}, 1.0, 1.0, None, "")
        return Prediction("card", "cuda", ranks.world_size, ranks.local_world_size, memory, target.limit_bytes, 0, time)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(search, "predict_by_layers", found)
    return found


def settled(place: Path, limit: int, machines: int = 1, each: int = 1, **sections: dict[str, Any]) -> Settled:
    sections = {**LONG, **sections}
    sections["train"] = {"global_batch_size": 64, **sections.get("train", {})}
    target = Target(find_device(CARD), RankInfo(0, machines * each, 0, each), limit * GIB)
    return choose(wish(place, **sections), target)[0]


def test_rows_are_added_while_they_fit_and_pay(tmp_path: Path, counted: Counted) -> None:
    found = settled(tmp_path, 80)
    assert found.values == {MICRO: 16, LEVEL: "none", **OFF}  # 32,768 tokens: twice as many are estimated to save 0.8 %
    assert counted.asked == [("auto", "none", 16)]  # the largest that pays comes first where there is much room
    assert found.reasons[MICRO] == "16 rows of 2,048 tokens at a time: predicted peak 72.00 GiB of 80.00 GiB"
    assert found.reasons[LEVEL] == "it fits without: predicted peak 72.00 GiB of 80.00 GiB"
    assert settled(tmp_path, 80, train={"global_batch_size": 6}).values[MICRO] == 6  # what divides the batch
    assert settled(tmp_path, 80, train={"global_batch_size": 15}).values[MICRO] == 15
    assert settled(tmp_path, 80, train={"global_batch_size": 5}).values[MICRO] == 5  # four fifths of a step of one row
    assert settled(tmp_path, 80, data={"max_length": 512}).values[MICRO] == 16
    counted.asked.clear()
    assert settled(tmp_path, 17, train={"gradient_checkpointing": "none"}).values == {MICRO: 2, **OFF}
    assert counted.asked == [("auto", "none", rows) for rows in (16, 1, 2)]


def test_what_is_written_stays(tmp_path: Path, counted: Counted) -> None:
    assert settled(tmp_path, 80, train={"micro_batch_size": 16}).values == {LEVEL: "none", **OFF}
    assert settled(tmp_path, 80, train={"gradient_checkpointing": "full"}).values == {MICRO: 16, **OFF}
    assert {level for _, level, _ in counted.asked[1:]} == {"full"}
    alone = settled(tmp_path, 80, data={"max_length": 2048, "packing": False})
    assert alone.values[MICRO] == 1 and "not packed stay alone" in alone.reasons[MICRO]


def test_more_is_recomputed_where_nothing_fits_with_less_or_the_rows_pay(tmp_path: Path, counted: Counted) -> None:
    found = settled(tmp_path, 10)
    assert found.values == {MICRO: 2, LEVEL: "full", **OFF}
    assert [asked[1:] for asked in counted.asked if asked[2] == 1][:2] == [("none", 1), ("selective", 1)]
    over = "predicted peak with none 12.00 GiB, with selective 11.00 GiB: too much for 10.00 GiB"
    assert found.reasons[LEVEL] == over
    faster = settled(tmp_path, 20, model={"config": {"max_position_embeddings": 4096}}, data={"max_length": 1024})
    assert faster.values == {
        MICRO: 4,
        LEVEL: "selective",
        **OFF,
    }  # 4,096 tokens: none has room for 3,072, which do not divide
    assert faster.reasons[LEVEL] == "estimated to be faster with the rows that then fit"
    least = settled(tmp_path, 8)
    assert least.values == {MICRO: 1, LEVEL: "full", **OFF}
    assert {reason.split("; less")[0] for reason in least.reasons.values()} == {
        "least memory: nothing is predicted to fit in 8.00 GiB; this peaks at 9.00 GiB"
    }
    assert "; less is needed with optimizer.state: 8bit" in least.reasons[MICRO]


def test_sharding_is_the_one_with_the_least_to_send_that_fits(tmp_path: Path, counted: Counted) -> None:
    adapted = settled(tmp_path, 24, each=2, adapter={"kind": "lora"})
    assert adapted.values[SHARD] == "none"
    assert adapted.reasons[SHARD] == "the whole model fits on each device: predicted peak 24.00 GiB of 24.00 GiB"
    split = settled(tmp_path, 8, each=2, adapter={"kind": "lora"})
    assert split.values[SHARD] == "full"
    assert split.reasons[SHARD] == "none needs at least 9.00 GiB: too much for 8.00 GiB"
    whole = settled(tmp_path, 24, each=2)
    assert (whole.values[SHARD], whole.reasons[SHARD]) == ("full", "one machine")
    several = settled(tmp_path, 24, machines=2, each=2)
    assert several.values[SHARD] == "hybrid" and several.reasons[SHARD].startswith("a copy for each machine fits")
    tight = settled(tmp_path, 3, machines=4, each=2)
    assert tight.values == {MICRO: 2, LEVEL: "full", SHARD: "full", **OFF}
    assert tight.reasons[SHARD] == "hybrid needs at least 5.00 GiB: too much for 3.00 GiB"
    counted.asked.clear()
    assert settled(tmp_path, 24, 4, 1, train={"gradient_checkpointing": "none"}).values[SHARD] == "full"
    assert settled(tmp_path, 24, each=2, parallel={"shard": "none"}).values == {MICRO: 4, LEVEL: "none", **OFF}


def test_a_copy_whose_state_alone_is_too_much_is_not_even_predicted(tmp_path: Path, counted: Counted) -> None:
    wished = wish(tmp_path, train={"gradient_checkpointing": "none", "micro_batch_size": 1})
    count = sum(weight.numel() for weight in meta_model(tiny_config("llama"), torch.float32).parameters())
    for limit, kinds in ((12 * count // 2 - 1, {"full"}), (12 * count // 2, {"hybrid", "full"})):
        counted.asked.clear()
        found, _ = choose(wished, Target(find_device(CARD), RankInfo(0, 4, 0, 2), limit))
        assert {kind for kind, *_ in counted.asked} == kinds
        assert "nothing is predicted to fit" in found.reasons[SHARD]


def test_tiles_and_offload_are_taken_only_where_nothing_fits_without(tmp_path: Path, counted: Counted) -> None:
    counted.saved = {"train.tiled_mlp": 1, "train.offload_activations": 2}
    tiled = settled(tmp_path, 8, train={"tiled_mlp": "auto"})
    assert tiled.values == {MICRO: 1, LEVEL: "full", "train.tiled_mlp": True, "train.offload_activations": False}
    over = "without it at least 9.00 GiB are predicted: too much for 8.00 GiB"
    assert tiled.reasons["train.tiled_mlp"] == over and tiled.reasons["train.offload_activations"] == "it fits without"
    assert settled(tmp_path, 7).values == {
        MICRO: 1, LEVEL: "full", "train.tiled_mlp": False, "train.offload_activations": True
    }  # fmt: skip
    assert settled(tmp_path, 6).values == {
        MICRO: 1, LEVEL: "full", "train.tiled_mlp": True, "train.offload_activations": True
    }  # fmt: skip
    kept = settled(tmp_path, 8, train={"tiled_mlp": False, "offload_activations": False})
    assert set(kept.values) == {MICRO, LEVEL} and "nothing is predicted to fit" in kept.reasons[LEVEL]
    sharded = settled(tmp_path, 4, each=2)
    assert sharded.values[SHARD] == "full" and sharded.values["train.tiled_mlp"] is True


def test_a_level_that_cannot_be_predicted_is_left_out(tmp_path: Path, counted: Counted) -> None:
    counted.broken = {"selective"}
    assert settled(tmp_path, 10).values[LEVEL] == "full"
    counted.broken = {"none", "selective", "full"}
    with pytest.raises(ValueError, match="no none"):
        settled(tmp_path, 10)


def test_tiny_models_are_predicted_for_a_card(tmp_path: Path) -> None:
    target = Target(find_device(CARD), RankInfo(), 2 * GIB)
    found, prediction = choose(wish(tmp_path), target)
    assert found.values == {MICRO: 8, LEVEL: "none", **OFF} and prediction.verdict == "fits"
    assert prediction.device == "NVIDIA GeForce RTX 4090"


def test_what_needs_less_is_proposed_for_compiled_layers_too(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "predict", counted)
    train: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 1, "gradient_checkpointing": "none"}
    wished = wish(tmp_path, **{**LONG, "train": {**train, "compile": True}}, adapter={"kind": "lora"})
    facts = DeviceFacts("cuda", "a card", 24 * GIB, 24 * GIB, True, 1)
    assembly: Any = SimpleNamespace(
        resolved=SimpleNamespace(recipe=wished, facts=facts, compiles=True),
        batches=SimpleNamespace(micro_batch_size=1),
        rank_info=RankInfo(),
        prepared=SimpleNamespace(path=tmp_path),
    )
    nothing = OomReport("step 1", "forward", "", None, 0, {}, (), {}, None, "write train.gradient_checkpointing: full")
    found = with_fix(assembly, nothing)  # it was predicted to fit, and did not: 12 GiB
    assert found.overrides == {LEVEL: "full"} and not found.is_tried
    assert found.hint() == (
        "--train.gradient_checkpointing full fits (predicted, not tried, peak 9.00 GiB of tensors); "
        "the global batch stays the same"
    )
    assert with_fix(assembly, nothing, limit=4 * GIB) is nothing  # not even that
    counted.saved = {"train.tiled_mlp": 1}
    assert with_fix(assembly, nothing, limit=8 * GIB).overrides == {LEVEL: "full", "train.tiled_mlp": "true"}
    counted.broken = {"none"}
    assert with_fix(assembly, nothing).hint() == "write train.gradient_checkpointing: full"
