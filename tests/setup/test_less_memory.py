"""Hints for memory that does not suffice: lines to write, and never what is written already.

And what a machine's processes take of its memory for the optimizer's states.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixtures.tables import cases
from tests.profile.test_predict import wish
from tests.train.synthetic import MAX_LENGTH, recipe_for, write_model
from tuner.config.load import load_recipe
from tuner.errors import MemoryLimitError
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup import mock
from tuner.setup.host_states import host_bytes
from tuner.setup.less_memory import less_memory, ways
from tuner.setup.resolve import resolve
from tuner.train.host_adamw import BUCKET, buffer_bytes


def test_ways_are_the_cheapest_first_and_none_is_taken_yet(tmp_path: Path) -> None:
    several: dict[str, Any] = {"micro_batch_size": 8, "gradient_checkpointing": "selective"}
    model = {"config": {"max_position_embeddings": 512}}
    recipe = wish(tmp_path, model=model, train=several, data={"max_length": 512})
    assert ways(recipe) == (
        "train.micro_batch_size: 4", "train.gradient_checkpointing: full", "data.max_length: 256", "adapter.kind: lora"
    )  # fmt: skip
    assert ways(recipe, 2) == ways(recipe)  # auto is no sharding that could be another
    assert "parallel.shard: full" in ways(wish(tmp_path, parallel={"shard": "none"}), 2)
    assert "parallel.shard: full" not in ways(wish(tmp_path, parallel={"shard": "none"}), 1)
    least = wish(
        tmp_path,
        model={**model, "quantize": "int8"},
        train={"micro_batch_size": 1, "gradient_checkpointing": "full"},
        adapter={"kind": "lora"},
        data={"max_length": 256},
    )
    assert ways(least) == ()
    assert less_memory(SimpleNamespace(recipe=least)) == "take a device with more memory, or more processes"
    some = wish(tmp_path, train={"gradient_checkpointing": "full", "gradient_checkpointing_layers": "50%"})
    assert ways(some)[0] == "train.gradient_checkpointing_layers: 100%"


@pytest.mark.parametrize("adapted", [False, True])
def test_every_way_loads_and_is_no_way_any_more(tmp_path: Path, adapted: bool) -> None:
    recipe = wish(tmp_path, train={"micro_batch_size": 2}, adapter={"kind": "lora"} if adapted else {})
    tree: Any = recipe.model_dump(mode="json")
    del tree["eval"]
    for line in ways(recipe):
        key, _, value = line.partition(": ")
        section, _, name = key.partition(".")
        tree[section] = {name: value} if section == "adapter" else {**tree[section], name: value}
        assert line not in ways(load_recipe(tree).recipe)


def test_a_mock_batch_that_does_not_fit_proposes_no_adapter_to_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(mock, "forward_backward", fails)
    monkeypatch.setattr(mock, "full_batches", lambda *given: SimpleNamespace(micro=[SimpleNamespace(input_ids=[0])]))
    for kind in ("none", "lora"):
        recipe = wish(tmp_path, train={"micro_batch_size": 1}, adapter={"kind": kind})
        state = SimpleNamespace(optimizer=SimpleNamespace(zero_grad=lambda: None), micro_batch_size=1)
        resolved, mesh = SimpleNamespace(recipe=recipe), SimpleNamespace(size=1)
        about: Any = SimpleNamespace(resolved=resolved, mesh=mesh, train_state=state, batches=state)
        with pytest.raises(MemoryLimitError) as raised:
            mock.mock_batch(about, Console(main=False))
        assert raised.value.hint is not None
        assert raised.value.hint.startswith("write train.gradient_checkpointing: full")
        assert ("adapter.kind: lora" in raised.value.hint) == (kind == "none")


BILLION = 10**9


@pytest.mark.parametrize(
    ("shard", "tensor", "world", "local", "copies"), cases(__file__, "shards_are_the_machines_own")
)
def test_shards_are_the_machines_own(
    shard: str, tensor: int, world: int, local: int, copies: float, tmp_path: Path
) -> None:
    write_model(tmp_path)
    recipe = recipe_for(tmp_path, optimizer={"offload": "host"}, parallel={"shard": shard, "tensor": tensor})
    ranks = RankInfo(0, world, 0, local)
    found = host_bytes(resolve(recipe, MAX_LENGTH, ranks), BILLION, ranks)
    assert found == copies * 8 * BILLION + local * 3 * 2 * 4 * BUCKET


def test_buffers_are_no_larger_than_what_passes_through_them() -> None:
    assert buffer_bytes(1000) < 8 * 1100
    assert buffer_bytes(100 * BUCKET) == 24 * BUCKET == 192 << 20
