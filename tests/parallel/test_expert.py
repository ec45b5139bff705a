"""Experts on several processes: each loss, gradient and weight is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig

from tests.fixtures import tables
from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import whole
from tests.model.tiny import SHAPE, family_config
from tests.parallel.experts import both, differences
from tests.train.synthetic import assembly_for, recipe_for
from tuner.checkpoint.load import content_sha256, load_into
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.root import CausalLM
from tuner.parallel.expert import SpreadExperts, check_spread, routed_experts
from tuner.parallel.gathered import gathered
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, run_tensors
from tuner.train.step import StepResult, forward_backward, optimizer_step

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
KINDS: dict[str, PretrainedConfig] = {
    "mixtral": family_config("mixtral", tied=False),
    "gpt-oss, with biases": GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, layer_types=["full_attention"] * 2
    ),
    "deepseek, with shared experts and a dense layer": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, **LATENT, **GROUPED, moe_intermediate_size=16
    ),
}
TRAINED = [1, 25, 3, 15, 20, 9, 11, 30]
ADAPTED: dict[str, Any] = {"kind": "lora", "r": 4}
OF_EXPERTS: dict[str, Any] = {**ADAPTED, "experts": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"world": 2, "local": 2, "expert": 2, "micro": 1},
    "two, recomputed": {"world": 2, "local": 2, "expert": 2, "micro": 2, "recompute": "selective"},
    "two, lora": {"world": 2, "local": 2, "expert": 2, "micro": 4, "adapter": ADAPTED},
    "two, lora on experts": {"world": 2, "local": 2, "expert": 2, "micro": 2, "adapter": OF_EXPERTS},
    "two shards, lora on experts": {"world": 2, "local": 2, "expert": 1, "micro": 1, "adapter": OF_EXPERTS},
    "2 x 2 shards, lora on experts": {"world": 4, "local": 4, "expert": 2, "micro": 1, "adapter": OF_EXPERTS},
    "2 x 2 shards": {"world": 4, "local": 4, "expert": 2, "micro": 1, "recompute": "full"},
    "2 x 2 replicas": {"world": 4, "local": 2, "expert": 2, "micro": 2, "shard": "hybrid"},
    "four": {"world": 4, "local": 4, "expert": 4, "micro": 1},
}
ONE: dict[str, Any] = {"world": 1, "local": 1, "expert": 1, "micro": 8}
QUICK = ("2 x 2 shards",)
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose loss has the term of its routers, and whose weights are far from each other."""
    directory = tmp_path_factory.mktemp("mixture")
    config: Any = family_config("qwen3-moe", tied=False)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    config.save_pretrained(directory)
    built = build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=5)
    generator = torch.Generator().manual_seed(5)  # the same weights whichever tests ran before
    with torch.no_grad():
        for parameter in built.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
    built.save_pretrained(directory)
    return directory


def assembled(model: Path, rank: int, layout: dict[str, Any]) -> Assembly:
    parallel = {"processes": layout["world"], "shard": layout.get("shard", "full"), "expert": layout["expert"]}
    train = {"global_batch_size": 8, "micro_batch_size": layout["micro"]}
    train["gradient_checkpointing"] = layout.get("recompute", "none")
    sections = {"adapter": layout.get("adapter", {"kind": "none"}), "model": {"router_z_loss_coef": 0.1}}
    recipe = recipe_for(model, train=train, parallel=parallel, **sections)
    return assembly_for(recipe, TRAINED, RankInfo(rank, layout["world"], rank % layout["local"], layout["local"]))


def gradients_of(assembly: Assembly) -> dict[str, torch.Tensor]:
    state = assembly.train_state
    forward_backward(state, 0, assembly.batches.step(0))
    found = {name: whole(one).clone() for name, one in state.gradients().items()}
    state.optimizer.zero_grad()
    return found


def taken(assembly: Assembly, steps: range) -> list[StepResult]:
    return [optimizer_step(assembly.train_state, i, assembly.batches.step(i), 1.0).read() for i in steps]


class One:
    """What one process makes of a global batch as one micro-batch."""

    def __init__(self, model: Path, adapter: dict[str, Any]) -> None:
        assembly = assembled(model, 0, {**ONE, "adapter": adapter})
        self.gradients = gradients_of(assembly)
        self.steps = taken(assembly, range(STEPS))
        self.weights = {name: parameter.detach() for name, parameter in assembly.train_state.parameters.items()}

    def require_same_gradients(self, assembly: Assembly) -> None:
        found = gradients_of(assembly)
        assert found.keys() == self.gradients.keys()
        for name, gradient in found.items():
            assert off(gradient, self.gradients[name]) < 2e-6, name

    def require_same_steps(self, assembly: Assembly) -> None:
        for there, here in zip(taken(assembly, range(STEPS)), self.steps, strict=True):
            assert there.loss == pytest.approx(here.loss, rel=1e-6)
            assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-6)
            assert there.figures == pytest.approx(here.figures, rel=1e-6)
        assert assembly.train_state.parameters.keys() == self.weights.keys()
        for name, parameter in assembly.train_state.parameters.items():
            assert off(whole(parameter.detach()), self.weights[name]) < 1e-5, name


@pytest.fixture(scope="module")
def alone(model: Path) -> One:
    return One(model, {"kind": "none"})


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-9))


@pytest.mark.multi
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_steps_are_those_of_one_process(name: str, model: Path, alone: One, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    one = One(model, layout["adapter"]) if "adapter" in layout else alone

    def work(rank: int) -> None:
        assembly = assembled(model, rank, layout)
        axes = (Replicate(),) if layout.get("shard") == "hybrid" else ()
        ends = ("", "_lora_A", "_lora_B") if layout.get("adapter") == OF_EXPERTS else ("",)
        for end in ends:
            name = f"model.layers.0.mlp.experts.gate_up_proj{end}"
            weight: Any = assembly.train_state.root.model.get_parameter(name)
            assert weight.placements == ((*axes, Shard(1), Shard(0)) if layout["expert"] > 1 else (Shard(0),))
            assert weight.to_local().shape[0] == 4 // max(layout["expert"], 2)
        one.require_same_gradients(assembly)
        one.require_same_steps(assembly)

    assert run_ranks(layout["world"], tmp_path, work) == [0] * layout["world"]


@pytest.mark.multi
def test_every_kind_of_experts_computes_as_in_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for name, config in KINDS.items():
            found = differences(*both(config, tmp_path / f"{name} {rank}"), rank)
            assert max(found.values()) < 5e-6, (name, found)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def layer(config: Any) -> nn.Module:
    """The experts of one layer, whole, with values of their own."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config._experts_implementation = "grouped_mm"
    module: nn.Module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


ROUTED = {
    "evenly": [[0, 1], [2, 3], [3, 0], [1, 2]], "to the first process alone": [[0, 1], [1, 0], [0, 1]],
    "to one expert of the second": [[3, 3], [3, 3]], "some to nobody": [[0, 2]],
}


def spread_layer(module: nn.Module) -> tuple[SpreadExperts, dict[str, torch.Tensor]]:
    """The same experts over all processes, and the weights of this one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread, own = SpreadExperts(module, mesh.get_group()), {}
    for name, weight in list(module.named_parameters()):
        part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        own[name] = part.requires_grad_()
        module.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))
    return spread, {name: weight for name, weight in module.named_parameters()}


@pytest.mark.multi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_the_routers_choose(dtype: torch.dtype, tmp_path: Path) -> None:
    config = family_config("qwen3-moe", tied=False)

    def work(rank: int) -> None:
        for name, choices in ROUTED.items():
            alone, module = layer(config).to(dtype), layer(config).to(dtype)
            spread, _ = spread_layer(module)
            # The second process has other tokens, in another number, which go to the same experts.
            rows = [(torch.tensor(choices * (1 + number)), number) for number in range(2)]
            results = [given(alone.forward, index, number, dtype) for index, number in rows]
            result = given(spread.forward, *rows[rank], dtype)
            exact = dtype == torch.float32
            for found, wanted in zip(result, results[rank], strict=True):
                assert off(found.float(), wanted.float()) < (5e-6 if exact else 2e-2), name
            for (key, weight), whole_weight in zip(module.named_parameters(), alone.parameters(), strict=True):
                assert weight.grad is not None and whole_weight.grad is not None
                own = whole_weight.grad.chunk(2)[rank]
                assert off(weight.grad.to_local().float(), own.float()) < (5e-6 if exact else 2e-2), (name, key)  # type: ignore[attr-defined]

    assert run_ranks(2, tmp_path, work) == [0, 0]


def given(forward: Any, index: torch.Tensor, number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What experts make of one process's tokens, and the gradients of these and of their weights."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randn(len(index), 32, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(index.shape, generator=generator).requires_grad_()
    output = forward(tokens, index, weights)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    assert tokens.grad is not None and weights.grad is not None
    return [output.detach(), tokens.grad, weights.grad]


@pytest.mark.multi
@pytest.mark.slow
def test_processes_that_have_it_whole_take_forwards_by_themselves(model: Path, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        root = assembled(model, rank, LAYOUTS["two"]).train_state.root.eval()
        with torch.no_grad():
            wanted = logits(root)
            with gathered(root):
                for _ in range(1 + 2 * rank):
                    assert torch.allclose(logits(root), wanted, atol=1e-6)
            assert torch.equal(logits(root), wanted)

    def logits(root: CausalLM) -> torch.Tensor:
        ids = torch.arange(3, 14)
        return root.logits(ids, torch.arange(11), (7, 4), torch.tensor([0, 6, 10]))

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "2 x 2 shards"])
def test_a_checkpoint_is_read_by_any_other_layout(name: str, model: Path, tmp_path: Path) -> None:
    run, spread = CheckpointDir(tmp_path / "run", "id"), LAYOUTS[name]

    def moved(assembly: Assembly, step: int) -> None:
        """Load a step, and save it as the next."""
        load_into(open_checkpoint(run.path / f"step-{step}"), run_tensors(assembly.train_state))
        save(run, step + 1, run_tensors(assembly.train_state), {"step": 1}, {})

    def first(rank: int) -> None:
        assembly = assembled(model, rank, spread)
        taken(assembly, range(1))
        save(run, 1, run_tensors(assembly.train_state), {"step": 1}, {})

    def then(rank: int) -> None:
        moved(assembled(model, rank, {**spread, "expert": 1}), 2)
        if name != "two":
            moved(assembled(model, rank, LAYOUTS["four"]), 3)

    assert run_ranks(spread["world"], tmp_path, first) == [0] * spread["world"]
    one = assembled(model, 0, ONE)
    before = content_of(one)
    moved(one, 1)
    assert not torch.equal(before, content_of(one)), "what was saved is not what a model begins with"
    assert run_ranks(spread["world"], tmp_path, then) == [0] * spread["world"]
    saved = sorted(run.path.glob("step-*"))
    assert len(saved) == (3 if name == "two" else 4)
    assert len({content_sha256(open_checkpoint(path)) for path in saved}) == 1


def content_of(assembly: Assembly) -> torch.Tensor:
    return assembly.train_state.root.model.get_parameter("model.layers.1.mlp.experts.down_proj").detach().clone()


@pytest.mark.parametrize(
    ("family", "size", "reason", "hint"), tables.cases(__file__, "what_cannot_be_spread_is_refused")
)
def test_what_cannot_be_spread_is_refused(family: str, size: int, reason: str, hint: str) -> None:
    built = meta_model(family_config(family, tied=False), torch.float32)
    with pytest.raises(RecipeError, match=reason) as caught:
        check_spread(built, size)
    assert hint in (caught.value.hint or "")
    if family == "mixtral":
        check_spread(built, 4)


def test_experts_with_weights_of_no_expert_are_refused() -> None:
    built = meta_model(family_config("mixtral", tied=False), torch.float32)
    for module in routed_experts(built).values():
        module.register_parameter("scale", nn.Parameter(torch.ones(7, device="meta")))
    with pytest.raises(RecipeError, match="has scale, which is no part of one expert"):
        check_spread(built, 2)


def test_layers_with_experts_elsewhere_do_without_tiles(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(tmp_path)}, "data": {"train": "a.jsonl"}, "train": {"tiled_mlp": True},
        "parallel": {"expert": 2},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"train\.tiled_mlp .*\(parallel\.expert\)"):
        load_recipe(tree)
