"""Losses of answers on several processes: the loss of a step, its gradients, and its collectives."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.fixtures.tensors import Operations, collectives, whole
from tests.train.answers import Answers
from tests.train.synthetic import assembly_for, draw_lora_b, recipe_for
from tuner.config.load import load_recipe
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.train.methods.method import build_method
from tuner.train.step import TrainState, forward_backward


def run_answers(case: dict[str, Any], rank_info: RankInfo, output: Path) -> None:
    """Make one global batch's gradients by every method of the case, in the type that it names."""
    model = Path(case["model"])
    recipe = recipe_for(model, adapter=case["adapter"], model={"kernels": "torch"}, parallel={"shard": case["shard"]})
    with process_group(rank_info, "cpu", 60):
        state = assembly_for(recipe, [1, 2, 3, 4], rank_info).train_state
        torch.manual_seed(7)
        draw_lora_b(state.parameters)
        if case["double"]:
            state.root.double()
        for method, section in case["methods"].items():
            loss, figures, gradients, collectives = gradients_of(state, section, case, rank_info)
            if rank_info.is_main:
                name = f"{case['name']}, {method}"
                facts = {"loss": loss, "figures": figures, "collectives": collectives}
                (output / f"{name}.json").write_text(json.dumps(facts))
                save_file(gradients, output / f"{name}.safetensors")


def gradients_of(
    state: TrainState, section: dict[str, Any], case: dict[str, Any], rank_info: RankInfo
) -> tuple[float, dict[str, float], dict[str, torch.Tensor], dict[str, int]]:
    """Loss, figures and gradients of the global batch, the same on every rank, and this one's collectives."""

    tree = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "method": section}
    state = replace(state, method=build_method(load_recipe(tree).recipe.method))
    for parameter in state.parameters.values():
        parameter.grad = None
    batches = Answers(16).step(case["rows"], case["micro"], rank_info.rank, rank_info.world_size)
    with Operations(collectives) as counter:
        sums, counts = forward_backward(state, 0, batches)
    totals = {}
    for name, term in {**sums.losses, **sums.figures}.items():
        total = term.value.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
        totals[name] = replace_value(term, total).mean(counts).item()
    gradients = {}
    for name, parameter in state.parameters.items():
        gradient = parameter.grad
        assert gradient is not None
        gradients[name] = whole(gradient)
    return sum(totals[name] for name in sums.losses), totals, gradients, Counter(counter.found)


def replace_value(term: Any, value: torch.Tensor) -> Any:
    return term._replace(value=value)
