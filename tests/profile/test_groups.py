"""Groups of processes that compute together: what they send, how long that takes, and which of them are searched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fixtures.predict_cases import Case
from tests.fixtures.predict_counted import resolved_case
from tests.profile.test_predict import wish
from tests.profile.test_traffic import Watched
from tests.profile.test_tree import Counted, fitted
from tuner.config.recipe import Recipe
from tuner.profile import fit as fitting
from tuner.profile.devices import find_device
from tuner.profile.estimate import LINKS, StepSetting, least_exchanged, seconds_of
from tuner.profile.predict import Target
from tuner.profile.prediction import Prediction
from tuner.profile.search import Speed
from tuner.profile.tracing import trace_step
from tuner.profile.traffic import Traffic, TrafficCounter
from tuner.profile.workload import workload
from tuner.runtime.dist import RankInfo
from tuner.runtime.torch_private import FakeStore
from tuner.setup.settled import changed
from tuner.setup.specs import step_sections, weight_parts

LAYERS, WIDTH, HEADS, KEY_HEADS, CHANNELS, FULL = 2, 32, 4, 2, 8, 4
TOKENS = 90
"""Of the one micro-batch."""
TRAINED = TOKENS - 3
AXES = {"parallel.tensor", "parallel.sequence"}
GIB = 1 << 30


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
