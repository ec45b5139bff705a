"""Adapters by peft's own configs against peft's own loop: losses, gradients and weights of every step, and resumed."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_config, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.fixtures.peft_kinds import KINDS
from tests.train.synthetic import assembly_for, recipe_for, resume, taken
from tuner.checkpoint.save import CheckpointDir, save
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly, run_tensors
from tuner.train.step_parts import StepPart

STEPS, LR, SEED = 5, 0.01, 42
MODEL = "llama"


class Noted(StepPart):
    """The gradients of each step, copied."""

    def __init__(self, assembly: Assembly) -> None:
        self.parameters = assembly.train_state.parameters
        self.steps: list[dict[str, torch.Tensor]] = []

    def after_backward(self) -> None:
        self.steps.append({name: one.grad.clone() for name, one in self.parameters.items() if one.grad is not None})


def assembled(model: Path, config: dict[str, Any]) -> Assembly:
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "max_grad_norm": "never", "duration": f"{STEPS} steps"}
    recipe = recipe_for(
        model, adapter={"kind": "peft", "config": config}, train=sizes, optimizer={"lr": LR, "weight_decay": 0.0},
        schedule={"kind": "constant", "warmup": "never"},
    )
    return assembly_for(recipe, [9, 30, 14, 21, 7, 18, 25, 11], RankInfo())


def own_loop(model: Path, config: dict[str, Any], assembly: Assembly) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """peft's own: a model of the same config, a document at a time, torch's AdamW; loss and gradients by step."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(SEED)
    with warnings.catch_warnings(action="ignore"):  # BOFT asks for a compiler, and does without
        adapted: Any = get_peft_model(base, get_peft_config(dict(config)))
    trained = {n.removeprefix("base_model.model."): p for n, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for step in range(STEPS):
        batches, loss = assembly.batches.step(step), torch.zeros(())
        for batch in batches.micro:
            ids, targets = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.targets)
            for document, wanted in zip(ids.split(batch.lengths), targets.split(batch.lengths), strict=True):
                logits = adapted(input_ids=document[None]).logits[0]
                loss = loss + cross_entropy(logits, wanted, reduction="sum") / batches.trained_count
        if config["peft_type"] == "ADALORA":  # its model adds a term to a loss that is asked of it
            some = {"input_ids": ids[None], "labels": ids[None]}
            loss = loss + adapted.base_model(**some).loss - adapted.base_model.model(**some).loss
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in trained.items()}))
        optimizer.step()
        if config["peft_type"] == "ADALORA":
            adapted.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    return [*found, (0.0, {name: p.detach() for name, p in trained.items()})]


@pytest.mark.slow("boft", "loha", "olora", "patterns", "hra", "miss")
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_pefts_own_loop_and_a_resumed_run_has_the_same_bits(
    name: str, model: Path, tmp_path: Path
) -> None:
    config = KINDS[name]
    whole = assembled(model, config)
    noted, run = Noted(whole), CheckpointDir(tmp_path, "id")
    whole.train_state.parts = (*whole.train_state.parts, noted)
    *steps, (_, weights) = own_loop(model, config, whole)
    losses = taken(whole, range(2))
    save(run, 2, run_tensors(whole.train_state), {"step": 2}, {})
    losses += taken(whole, range(2, STEPS))
    for loss, gradients, (own_loss, own) in zip(losses, noted.steps, steps, strict=True):
        assert loss == pytest.approx(own_loss, rel=1e-5)
        assert gradients.keys() == own.keys()
        size = torch.cat([one.flatten() for one in own.values()]).norm()
        for key, gradient in gradients.items():
            assert (gradient - own[key]).norm() <= 1e-5 * size, key
    for key, parameter in whole.train_state.parameters.items():
        assert (parameter - weights[key]).norm() <= 1e-4 * weights[key].norm(), key
    again = assembled(model, config)
    again.train_state.optimizer.allocate()
    resume(again, tmp_path / "step-2", 2)
    assert taken(again, range(2, STEPS)) == losses[2:]
    for key, parameter in again.train_state.parameters.items():
        assert torch.equal(parameter, whole.train_state.parameters[key]), key
