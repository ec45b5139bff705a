"""Rows cut over processes train as whole rows do: losses, norms and gradients of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomConfig, Phi3Config

from tests.fixtures.processes import run_ranks
from tests.model.tiny import FAMILIES, HYBRIDS, SHAPE
from tests.parallel.cut_rows import OTHERS, OWN, Case, Taken, looked_at, write
from tests.parallel.test_fsdp import Sent
from tests.train.test_answer_losses import PLAIN
from tuner.errors import RecipeError
from tuner.model.build import meta_model
from tuner.parallel.sequence import SequenceCut, check_cut
from tuner.setup.build import Assembly
from tuner.train.step import forward_backward

LORA = {"adapter": {"kind": "lora", "r": 4}}
ROUTED = {"model": {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}}
BF16 = {"train": {"precision": "bf16"}}
FEW = [
    Case("gemma3", micro=4, sections={"train": {"gradient_checkpointing": "selective"}}),
    Case("qwen3-moe", shard="none", sections=ROUTED),
    Case("three key heads", processes=4, sections=LORA),
]
"""The last one has shards beside shares."""
MANY = [
    *(Case(family) for family in (*OTHERS, "llama", "qwen3", "mistral", "phi", "phi3", "gpt2", "olmo2", "mixtral")),
    Case("llama", sections={"train": {"gradient_checkpointing": "full"}}),
    Case("llama", micro=1, sections={"parallel": {"accumulate": "whole"}}),
    Case("llama", sections={"adapter": {"kind": "dora", "r": 4}}),
    Case("qwen3", sections={**LORA, "train": {"tiled_mlp": True}}),
    Case("large vocabulary", sections={"optimizer": {"rows": [{"match": ["model.embed_tokens.weight"]}]}}),
    Case("llama", sections=BF16, apart=2e-2),
    Case("llama", micro=1, sections={"train": {"precision": "fp16"}}, apart=2e-2),
    Case("gemma3", sections=BF16, apart=2e-2),
]
MANY_FOUR = [
    *(
        Case(family, processes=4, tensor=2, apart=5e-6)
        for family in ("llama", "qwen3", "gemma3", "olmo2", "phi", "qwen2")
    ),
    Case("gemma2", processes=4, tensor=2, micro=1, sections=LORA, apart=5e-6),
    Case("mistral", processes=4),
    Case("qwen3", sequence=4, processes=4, micro=4, sections=LORA),
    *(Case(family, sequence=4, processes=4, micro=1) for family in (*OTHERS, "gemma3", "olmo2", "phi", "qwen3-moe")),
    Case("gemma3", processes=4, machines=2, shard="hybrid"),
    Case("llama", processes=4, shard="none", sections=LORA),
    Case("qwen3-moe", processes=4, sections=ROUTED),
]
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
ODD = {
    "longrope": (Phi3Config, SHAPE | {"original_max_position_embeddings": 64, "rope_parameters": _LONGROPE}),
    "bloom": (BloomConfig, {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
}
REFUSED = {
    "falcon-h1": "FalconH1ForCausalLM has layers that carry a state",
    "longrope": "Phi3ForCausalLM rotates documents by factors of their length",
    "bloom": "BloomForCausalLM",
    "llama": "3 does not divide the 4 attention heads",
}


@pytest.mark.slow("gemma3 2 processes sequence2 full 4 rows {'train': {'gradient_checkpointing': 'selective'}}")
@pytest.mark.multi
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_training_is_that_of_one_process(case: Case, tmp_path: Path) -> None:
    compared(case, tmp_path, Taken.of)


@pytest.mark.multi
def test_what_is_looked_at_and_losses_of_answers_are_those_of_one_process(tmp_path: Path) -> None:
    def taken(assembly: Assembly) -> Taken:
        return looked_at(assembly).with_(Taken.of_answers(assembly, ["several", "kto"]))

    compared(Case("qwen3", sections=LORA), tmp_path, taken)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("case", [*MANY, *MANY_FOUR], ids=lambda case: case.name)
def test_any_training_is_that_of_one_process(case: Case, tmp_path: Path) -> None:
    compared(case, tmp_path, Taken.of)


@pytest.mark.slow("distill")
@pytest.mark.multi
@pytest.mark.parametrize(
    "kind",
    ["share", pytest.param("Whole", marks=pytest.mark.slow), "distill", pytest.param("reward", marks=pytest.mark.slow)],
)
def test_rewards_a_teacher_and_losses_of_ones_own_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write(tmp_path, "qwen3")
    methods = {
        "distill": {"kind": "distill", "teacher": str(tmp_path / "qwen3"), "ce_weight": 0.3, "beta": 0.5},
        "reward": {"kind": "reward", "center": 0.1},
    }
    method = methods.get(kind, {"kind": "custom", "use": f"{tmp_path / 'own.py'}:{kind}"})
    taken = partial(Taken.of_answers, methods=[]) if kind == "reward" else Taken.of
    compared(Case("llama", sections={"method": method}), tmp_path, taken)


@pytest.mark.multi
@pytest.mark.slow
def test_all_losses_of_answers_are_those_of_one_process(tmp_path: Path) -> None:
    case = Case("llama", sequence=4, processes=4, shard="none")
    compared(case, tmp_path, partial(Taken.of_answers, methods=list(PLAIN)))


def compared(case: Case, directory: Path, taken: Callable[[Assembly], Taken]) -> None:
    write(directory, case.family)
    wanted = taken(case.assembly(directory, None))

    def work(rank: int) -> None:
        found = wanted.differences(taken(case.assembly(directory, rank)), case.apart)
        assert not found, "\n".join(found)

    assert run_ranks(case.processes, directory, work) == [0] * case.processes


@pytest.mark.multi
def test_a_process_computes_its_share_and_sends_what_the_formula_says(tmp_path: Path) -> None:
    """A layer sends query, key and value of all heads at its positions, and gets as much; the output goes back."""
    case = Case("llama", micro=4, shard="none", sections={"model": {"kernels": "torch"}})
    write(tmp_path, case.family)
    alone = case.assembly(tmp_path, None)
    with FlopCounterMode(display=False) as whole:
        forward_backward(alone.train_state, 0, alone.batches.step(0))

    def work(rank: int) -> None:
        assembly, sent = case.assembly(tmp_path, rank), Sent()
        with sent, FlopCounterMode(display=False) as own:
            forward_backward(assembly.train_state, 0, assembly.batches.step(0))
        assert own.get_total_flops() == pytest.approx(whole.get_total_flops() / 2, rel=0.01)
        config, (batch,) = assembly.resolved.config, assembly.batches.step(0).micro
        positions, wanted = len(batch.input_ids) // 2, batch.trained_positions
        heads, keys, width = config.num_attention_heads, config.num_key_value_heads, 8
        attended = positions * (heads + 2 * keys + heads) * width * config.num_hidden_layers
        moved = max(int((wanted // positions == rank).sum()), len(np.array_split(wanted, 2)[rank]))
        assert sent.bytes["alltoall_base_"] == 2 * 4 * (attended + moved * config.hidden_size)
        assert sent.calls["alltoall_base_"] == 2 * (2 * config.num_hidden_layers + 1)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_positions_in_any_order_come_to_whoever_computes_them(tmp_path: Path) -> None:
    """And their gradients go back, those of a position that is wanted twice added up."""

    def work(rank: int) -> None:
        cut, rows = SequenceCut(dist.group.WORLD), torch.arange(24.0).view(12, 2)
        for wanted in ([9, 1, 4, 10, 0, 5, 2, 6], [3], [], [4, 4, 9, 7], list(range(12))):
            at, hidden = np.array(wanted, dtype=np.int64), cut.own(rows).clone().requires_grad_()
            taken = cut.taken(hidden, at if len(wanted) % 2 else torch.as_tensor(at))
            assert torch.equal(taken, rows[at][cut.part(len(at))])
            joined = cut.whole(taken, len(at))
            assert torch.equal(joined, rows[at])
            weights = torch.arange(1.0, len(at) + 1)[:, None]
            (joined * weights).sum().backward()
            counted = torch.zeros(12, 2).index_add_(0, torch.as_tensor(at), weights.expand(-1, 2) * cut.size)
            assert torch.equal(hidden.grad, cut.own(counted))  # type: ignore[arg-type]

    assert run_ranks(3, tmp_path, work) == [0] * 3


@pytest.mark.parametrize(("family", "why"), REFUSED.items(), ids=REFUSED)
def test_models_whose_rows_cannot_be_cut_are_refused_by_name(family: str, why: str) -> None:
    config = (OTHERS | FAMILIES | HYBRIDS | ODD)[family]
    model = meta_model(config[0](**config[1]), torch.float32)
    with pytest.raises(RecipeError, match=why) as refused:
        check_cut(model, 3)
    assert refused.value.hint == ("write one of 1, 2, 4" if family == "llama" else "write parallel.sequence: 1")
