"""The search finds what trying everything finds, with few predictions.

Groups of processes that compute together: what they send, how long that takes, and which of them are searched.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.fixtures.predict_cases import Case
from tests.fixtures.predict_counted import resolved_case
from tests.profile.test_predict import wish
from tests.profile.test_traffic import Watched
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.profile import fit as fitting
from tuner.profile import search
from tuner.profile.devices import find_device
from tuner.profile.estimate import LINKS, StepSetting, least_exchanged, seconds_of
from tuner.profile.fit import Fit, fit
from tuner.profile.predict import Target
from tuner.profile.prediction import PARTS, MemoryMoment, MemoryTimeline, Part, Prediction, TimeEstimate
from tuner.profile.report import choices_table, flags
from tuner.profile.search import Dimension, Speed, Tree, Trials, lines_to_write, tradeoffs_of
from tuner.profile.tracing import trace_step
from tuner.profile.traffic import Traffic, TrafficCounter
from tuner.profile.workload import workload
from tuner.runtime.dist import RankInfo
from tuner.runtime.torch_private import FakeStore
from tuner.setup.settled import changed, rows_at_once
from tuner.setup.specs import step_sections, weight_parts

GIB = 1 << 30


class Made:
    """Stands in for trials: memory and time by the place of each dimension's setting."""

    def __init__(self, limit: float, weights: tuple[float, ...], late: float) -> None:
        self.limit, self.weights, self.late, self.asked = limit, weights, late, set[str]()

    def seconds(self, values: Mapping[str, Any]) -> float:
        """The more memory, the faster; by how much is another matter for each."""
        return 100.0 - sum(place * (number + 1) for number, place in enumerate(values.values()))

    def choice(self, values: Mapping[str, Any]) -> Any:
        """Predicted: whether it fits, and how long it takes with what is sent."""
        self.asked.add(repr(values))
        needs = sum(weight * place for weight, place in zip(self.weights, values.values(), strict=True))
        step_s = self.seconds(values) + self.late * (sum(values.values()) % 3)
        return SimpleNamespace(fits=needs <= self.limit, lacks_host=False, step_s=step_s, overrides=dict(values))

    confirmed = choice

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """The first two do not go together at their most."""
        return "no" if values["a"] == 2 and values["b"] == 2 else None

    def may_fit(self, values: Mapping[str, Any]) -> bool:
        """Nothing is known."""
        return True

    def too_large(self, values: Mapping[str, Any]) -> bool:
        """Nothing is known."""
        return False

    def differing(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All that is not at its least."""
        return {key: value for key, value in values.items() if value}


def test_the_fastest_of_all_is_found_with_few_predictions() -> None:
    chance, asked, every = random.Random(3), 0, 0
    for _ in range(40):
        made: Any = Made(chance.uniform(0, 14), tuple(chance.uniform(0, 3) for _ in "abcd"), chance.choice((0.0, 2.0)))
        dimensions = [Dimension(tuple({name: place} for place in range(3))) for name in "abcd"]
        found = Tree(dimensions, made.seconds, made).fastest()
        asked, every = asked + len(made.asked), every + 81
        combinations = [dict(zip("abcd", places, strict=True)) for places in product(range(3), repeat=4)]
        tried = [made.choice(values) for values in combinations if made.refusal(values) is None]
        best = min((choice for choice in tried if choice.fits), key=lambda choice: choice.step_s)
        assert found is not None and found.step_s == best.step_s
    assert asked < every / 4


STATE = {"fp32": 8, "8bit": 2}
KEPT = {"none": 8, "selective": 6, "full": 4}


class Counted:
    """Stands in for predictions: GiB that are simple to add up."""

    def __init__(self) -> None:
        self.asked: list[Recipe] = []
        self.refused = ""

    def __call__(self, recipe: Recipe, target: Target, layers: int = 0, prepared: Path | None = None) -> Prediction:
        self.asked.append(recipe)
        train, optimizer = recipe.train, recipe.optimizer
        if self.refused and getattr(train, self.refused) is True:
            raise RecipeError(f"no {self.refused}")
        assert optimizer.kind == "adamw"
        rows, base = rows_at_once(recipe.train), 4 if recipe.model.dtype != "bf16" else 2
        if recipe.adapter.kind != "none":
            base = {"none": 2, "int8": 1, "nf4": 0}[recipe.model.quantize]
        trained = recipe.adapter.kind == "none"
        state = 0 if optimizer.offload == "host" or not trained else STATE[optimizer.state]
        kept = (
            KEPT[str(train.gradient_checkpointing)]
            - 2 * (train.offload_activations is True)
            - (train.tiled_mlp is True)
        )
        parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
        parts |= {"parameters": base * GIB, "optimizer": state * GIB, "activations": rows * kept * GIB}
        host: dict[Part, int] = {}
        if optimizer.offload == "host" and trained:
            host["optimizer"] = 8 * GIB
        if train.offload_activations is True:
            host["activations"] = 2 * rows * GIB
        memory = MemoryTimeline((MemoryMoment("backward", "", parts),), {}, host)
        time = TimeEstimate({}, 1.0, 1.0, None, "", Traffic())
        return Prediction(
            target.device.shown, "cuda", 1, 1, memory, target.limit_bytes, 0.0, time, (), target.host_limit_bytes
        )


def fitted(recipe: Recipe, target: Target, quick: Any, whole: Any = None) -> Fit:
    """By stand-ins for predictions; without one for whole models the quick ones choose."""
    alike = search.layers_alike if whole else (lambda model: 0)
    with patch.multiple(search, predict_by_layers=quick, predict=whole, layers_alike=alike):
        return fit(recipe, target)


def found(place: Path, limit: int, counted: Counted, host: int = 64, **sections: dict[str, Any]) -> Fit:
    sections["train"] = {"micro_batch_size": 1, "gradient_checkpointing": "none", **sections.get("train", {})}
    target = Target(find_device("rtx4090-24g"), RankInfo(), limit * GIB, host * GIB)
    return fitted(wish(place, **sections), target, counted)


def test_what_changes_nothing_is_tried_before_what_does(tmp_path: Path) -> None:
    counted = Counted()
    roomy = found(tmp_path, 80, counted)
    assert roomy.choices[0].overrides == {"train.micro_batch_size": 8} and not roomy.changes
    assert flags(roomy.choices[0]) == "--train.micro_batch_size 8"
    assert choices_table(roomy.choices)[1][0] == "choice"
    assert roomy.predictions == len(counted.asked) < 10
    times = [choice.step_s for choice in roomy.choices]
    assert times == sorted(times)
    tight = found(tmp_path, 7, Counted())  # weights 4, a row at least 1 with all that goes to the host
    overrides = tight.choices[0].overrides
    assert overrides["optimizer.offload"] == "host" and overrides["train.gradient_checkpointing"] in {
        "selective",
        "full",
    }
    assert not tight.changes and not tight.last_resort and tight.warnings() == []
    assert tight.choices[0].prediction.host_bytes > 0


def test_what_changes_results_is_named(tmp_path: Path) -> None:
    eight = found(tmp_path, 7, Counted(), host=4)  # no room on the host for the states
    assert eight.choices[0].overrides["optimizer.state"] == "8bit"
    assert eight.changes == {"optimizer.state": "AdamW's moments are kept in 8 bits"}
    assert eight.warnings() == ["optimizer.state changes results: AdamW's moments are kept in 8 bits"]
    assert eight.as_json()["changes_results"] == eight.changes
    rounded = found(tmp_path, 5, Counted(), host=4, train={"precision": "bf16"})  # whose products take bf16 weights
    assert rounded.choices[0].overrides["optimizer.rounding"] == "stochastic"
    assert set(rounded.changes) == {"optimizer.state", "model.dtype", "optimizer.rounding"}
    adapted = found(tmp_path, 2, Counted())
    assert adapted.last_resort and adapted.choices[0].overrides["adapter.kind"] == "lora"
    assert adapted.choices[0].overrides["model.quantize"] == "nf4"
    assert adapted.warnings()[0] == "as a last resort: nothing fits that trains the weights themselves"


def test_a_frozen_base_is_quantized_before_rows_are_cut(tmp_path: Path) -> None:
    lora = {"adapter": {"kind": "lora"}}
    assert found(tmp_path, 3, Counted(), **lora).changes == {}
    assert found(tmp_path, 2, Counted(), **lora).choices[0].overrides["model.quantize"] == "int8"
    assert [dict(tradeoff.values) for tradeoff in tradeoffs_of(wish(tmp_path, **lora))] == [
        {}, {"model.quantize": "int8"}, {"model.quantize": "nf4"}
    ]  # fmt: skip


def test_what_the_model_refuses_is_left_out(tmp_path: Path) -> None:
    counted = Counted()
    counted.refused = "tiled_mlp"
    tight = found(tmp_path, 7, counted)
    assert tight.choices[0].fits and "train.tiled_mlp" not in tight.choices[0].overrides
    counted.refused = "mock_batch"
    with pytest.raises(RecipeError, match="no mock_batch"):
        found(tmp_path, 7, counted, train={"mock_batch": True})


def test_times_are_of_the_target_whatever_a_whole_prediction_was_made_for(tmp_path: Path) -> None:
    target, sections = Target(find_device("rtx4090-24g"), RankInfo(), 24 * GIB), {"train": {"micro_batch_size": 1}}
    quick, whole = (
        fitted(wish(tmp_path, **sections), target, Counted(), made).choices for made in (None, Counted())
    )
    assert quick[0].overrides == whole[0].overrides and quick[0].step_s == whole[0].step_s < 1


def test_the_copy_of_saves_is_given_up_where_the_host_has_no_room_for_it(tmp_path: Path) -> None:
    plain = Counted()

    def counted(recipe: Recipe, target: Target, layers: int = 0, prepared: Path | None = None) -> Prediction:
        said = plain(recipe, target, layers, prepared)
        if recipe.checkpoint.async_save is not False:
            said.memory.host["staging"] = 60 * GIB  # type: ignore[index]
        return said

    target = Target(find_device("rtx4090-24g"), RankInfo(), 80 * GIB, 32 * GIB)
    best = fitted(wish(tmp_path), target, counted).choices[0]
    assert best.overrides["checkpoint.async_save"] is False and best.fits


def test_lines_to_write_name_what_they_change(tmp_path: Path) -> None:
    lines = lines_to_write(wish(tmp_path))
    assert lines[0] == "optimizer.state: 8bit (AdamW's moments are kept in 8 bits)"
    assert lines[-1].startswith("adapter.kind: lora, model.quantize: nf4 (")
    assert lines_to_write(wish(tmp_path, adapter={"kind": "lora"}, model={"quantize": "nf4"})) == []
    assert Trials(wish(tmp_path), Target(find_device("rtx4090-24g"), RankInfo(), GIB)).count == 0


LAYERS, WIDTH, HEADS, KEY_HEADS, CHANNELS, FULL = 2, 32, 4, 2, 8, 4
TOKENS = 90
"""Of the one micro-batch."""
TRAINED = TOKENS - 3
AXES = {"parallel.tensor", "parallel.sequence"}


@pytest.fixture
def four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def place(recipe: Any, ranks: RankInfo, speed: Speed) -> StepSetting:
    """Where a recipe's step is computed."""
    return StepSetting(find_device("cpu"), ranks, workload(recipe, speed._resolved, ranks))


@pytest.mark.usefixtures("four")
def test_what_groups_send_is_counted_apart_from_weights() -> None:
    group = dist.new_group([0, 1])
    counter = TrafficCounter([], 1, {str(group.group_name)})
    with Watched(counter):
        counter.begin("forward")
        dist.all_reduce(torch.ones(4), group=group)
        dist.all_to_all_single(torch.ones(6, 2), torch.ones(6, 2), [1, 2, 2, 1], [3, 1, 1, 1])
        dist.all_reduce(torch.ones(4))
    (found,) = counter.micro
    summed, sent = 2 * 16 * 1 // 2, (6 - 1) * 2 * FULL  # rank 1 keeps one of the six rows that it has
    assert (found.exchanged, found.exchanged_far) == (summed + sent, summed + sent)
    assert (found.reduced, found.gathered) == (2 * 16 * 3 // 4, 0)


def test_what_is_exchanged_is_waited_for() -> None:
    ahead = Traffic(gathered=int(LINKS["machine"]))
    assert seconds_of(3.0, ahead) == 3.0 and seconds_of(0.5, ahead) == 1.0
    together = Traffic(exchanged=int(LINKS["machine"] + LINKS["network"]), exchanged_far=int(LINKS["network"]))
    assert seconds_of(3.0, together) == 5.0


def test_cut_rows_send_queries_keys_values_and_outputs(tmp_path: Path) -> None:
    resolved, ranks, step = resolved_case(Case("llama", {"parallel.sequence": 2}, ((40, 30, 20),), 2), tmp_path)
    (found,) = trace_step(resolved, ranks, step).traffic
    of_layers = LAYERS * 2 * (TOKENS // 2) * 2 * (HEADS + KEY_HEADS) * CHANNELS * FULL // 2
    assert found.exchanged == of_layers, "the hidden states that are trained are where their losses are computed"
    assert found.reduced > 0 < found.gathered, "weights are sharded over both"


def test_split_layers_send_sums_of_blocks_and_of_the_vocabulary(tmp_path: Path) -> None:
    resolved, ranks, step = resolved_case(Case("llama", {"parallel.tensor": 2}, ((40, 30, 20),), 2), tmp_path)
    (found,) = trace_step(resolved, ranks, step).traffic
    of_layers, embedded, of_head = LAYERS * 4 * TOKENS * WIDTH, TOKENS * WIDTH, TRAINED * (WIDTH + 3)
    assert found == Traffic(exchanged=(of_layers + embedded + of_head) * FULL), "each sum is sent once, and once more"


def test_tokens_are_sent_to_their_experts_and_back_evenly(tmp_path: Path) -> None:
    resolved, ranks, step = resolved_case(Case("qwen3-moe", {"parallel.expert": 2}, ((40, 30, 20),), 2), tmp_path)
    (found,) = trace_step(resolved, ranks, step).traffic
    chosen, counts = 2 * TOKENS, 8 * 4
    assert found.exchanged == LAYERS * (4 * chosen * WIDTH * FULL + counts) // 2
    assert found.gathered > 0 < found.reduced


def test_least_of_an_estimate_is_what_layers_send(tmp_path: Path) -> None:
    ranks = RankInfo(0, 4, 0, 4)
    recipe = wish(tmp_path)
    target = Target(find_device("cpu"), ranks, 1 << 34)
    speed = Speed(recipe, target)
    config = speed._resolved.config
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    channels = config.hidden_size // heads
    tokens, layers = 8 * 64, config.num_hidden_layers
    expected = {
        "tensor": 2 * 2 * 2 * config.hidden_size * tokens / 2 * layers * FULL / 2,
        "sequence": 2 * 2 * (heads + key_heads) * channels * (tokens / 2 / 2) * layers * FULL / 2,
    }
    for axis, sent in expected.items():
        values = {f"parallel.{axis}": 2, "parallel.shard": "full"}
        grouped, sections = changed(recipe, values), step_sections(speed._resolved, values)
        assert least_exchanged(sections, config, place(grouped, ranks, speed)).exchanged == sent, axis
        assert speed.step_s({f"parallel.{axis}": 2}) > speed.busy_s({f"parallel.{axis}": 2})
        assert weight_parts(grouped.parallel, ranks) == 4
    assert speed.busy_s({"parallel.sequence": 2}) >= speed.busy_s({}), "the same arithmetic, of fewer tokens at a time"


def test_groups_that_the_model_can_have_are_searched(tmp_path: Path) -> None:
    target = Target(find_device("cpu"), RankInfo(0, 8, 0, 8), 1 << 34)
    recipe = wish(tmp_path)
    speed = Speed(recipe, target)
    heads = speed._resolved.config.num_attention_heads
    found = [tuple(sizes.values()) for sizes in fitting._groups(speed, recipe)]
    assert found[-1] == (1, 1, 1) and (1, heads, 1) in found and (heads, 1, 1) in found
    assert not any(expert > 1 or tensor > heads or sequence > heads for tensor, sequence, expert in found)
    assert fitting._groups(Speed(recipe, Target(find_device("cpu"), RankInfo(), 1 << 34)), recipe) == [
        {"parallel.tensor": 1, "parallel.sequence": 1, "parallel.expert": 1}
    ]


class Spread(Counted):
    """Stands in for predictions of eight processes: each group divides the activations of a row."""

    def __call__(self, recipe: Recipe, target: Target, layers: int = 0, prepared: Path | None = None) -> Prediction:
        found = super().__call__(recipe, target, layers, prepared)
        parts: Any = found.memory.moments[0].parts
        parts["activations"] //= recipe.parallel.tensor * recipe.parallel.sequence
        return found


def test_rows_are_cut_where_nothing_else_fits(tmp_path: Path) -> None:
    def found(limit: int) -> tuple[dict[str, Any], int]:
        counted = Spread()
        target = Target(find_device("rtx4090-24g"), RankInfo(0, 8, 0, 8), limit * GIB, GIB)  # the host has no room
        best = fitted(recipe, target, counted).choices[0]
        assert best.fits
        return best.overrides, len(counted.asked)

    recipe = wish(tmp_path, train={"micro_batch_size": 1, "gradient_checkpointing": "none", "tiled_mlp": False})
    roomy, asked = found(24)
    assert not AXES & set(roomy) and asked < 12
    tight, asked = found(14)  # weights and states 12, a row 4 where layers are computed again
    assert len(AXES & set(tight)) == 1 and asked < 200, "of 2,016 combinations"
