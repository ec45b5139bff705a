"""Every method that compares answers, and every way to ask a model, where processes split layers and vocabulary."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.fixtures import split, tensors
from tests.fixtures.processes import run_ranks
from tests.model.tiny import family_config
from tests.train.answers import Answers
from tests.train.test_answer_losses import PACKED, PLAIN
from tests.train.test_evaluate import Rows
from tuner.config.load import load_recipe
from tuner.data.prepared import PreparedSample
from tuner.evals.scorer import Scorer
from tuner.evals.task import ScoreRequest
from tuner.model.build import ModelSpec, build_model, head_layer, meta_model, model_config
from tuner.model.root import CausalLM, trained_parameters
from tuner.parallel.assemble import assemble
from tuner.parallel.mesh import Mesh
from tuner.parallel.values import materialise
from tuner.train.evaluate import answer_samples, evaluate, held_out
from tuner.train.guard import Guard
from tuner.train.methods.method import Method, build_method
from tuner.train.step import StepConfig, TrainState, forward_backward

CASES = ((2, split.Split("qwen3", tied=True)), (4, split.Split("llama", adapter="lora")))
"""Processes, two of which split each layer; with an adapter the reference is the model without it."""


class Words:
    """Stands for a tokenizer: a token is a number."""

    eos_ids = (2,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, skip: bool = False) -> str:
        return " ".join(map(str, ids))


def method_of(section: dict[str, Any]) -> Method:
    tree: dict[str, Any] = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "method": section}
    return build_method(load_recipe(tree).recipe.method)


def config_of(mesh: Mesh) -> StepConfig:
    return StepConfig(torch.device("cpu"), nullcontext, None, 7, mesh)


def of_answers(root: CausalLM, mesh: Mesh, method: Method) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step over answers to prompts, and every gradient of it. Collective."""
    config = config_of(mesh)
    parameters = trained_parameters(root)
    state = TrainState(root, parameters, cast(Any, None), config, Guard(config.device), method)
    sums, counts = forward_backward(state, 0, Answers(16).step(PACKED, 2, mesh.data_rank, mesh.data_size))
    loss = sums.loss(counts).detach()
    if mesh.size > 1:
        dist.all_reduce(loss)
        loss /= mesh.tensor
    gradients = {name: tensors.whole(gradient) for name, gradient in state.gradients().items()}
    for parameter in parameters.values():
        parameter.grad = None
    return loss.item(), gradients


def asked(root: CausalLM, mesh: Mesh) -> dict[str, Any]:
    """What evaluations, samples and tasks are told. Collective."""
    tokenizer: Any = Words()
    config, prompts = config_of(mesh), [[3, 4, 5, 6], [7, 8], [9], [11, 12, 13]]
    scorer = Scorer(root, config, tokenizer, 16)
    requests = [ScoreRequest(tuple(one), (number + 20, 30)) for number, one in enumerate(prompts)]
    state = TrainState(root, {}, cast(Any, None), config, Guard(config.device), method_of({"kind": "sft"}))
    rows: Any = Rows()
    held = held_out(rows, [3, 5], ["a.jsonl", "b.jsonl"])
    samples = [PreparedSample(one, "", "1 2 3") for one in prompts]
    found = evaluate(root, config, held, 1, None)
    return {
        "losses": [found.loss, *(found.sources[name].loss for name in ("a", "b"))],
        "tokens": [found.tokens, *(found.sources[name].tokens for name in ("a", "b"))],
        "samples": answer_samples(state, samples, tokenizer),
        "nats": [one.log_likelihood for one in scorer.likelihoods(requests)],
        "greedy": [one.is_greedy for one in scorer.likelihoods(requests)],
        "answers": scorer.answers(prompts, [5, 1, 7, 3], [(), (), ("4",), ()]),
    }


Answered = tuple[float, dict[str, torch.Tensor]]


def compare(expected_of: Answered, root: CausalLM, mesh: Mesh, section: dict[str, Any]) -> None:
    """The loss and every gradient of one process, and those of the model on the mesh."""
    expected, wanted = expected_of
    found, gradients = of_answers(root, mesh, method_of(section))
    assert found == pytest.approx(expected, rel=2e-6), section
    assert gradients.keys() == wanted.keys()
    most = max(float(one.norm()) for one in wanted.values())
    for name, gradient in wanted.items():
        scale = max(float(gradient.norm()), 0.02 * most)
        assert float((gradients[name] - gradient).norm()) / scale < 1e-5, (section, name)


@pytest.mark.multi
@pytest.mark.parametrize(("processes", "case"), [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow)], ids=str)
def test_methods_and_answers_are_those_of_one_process(processes: int, case: split.Split, tmp_path: Path) -> None:
    names = ["sigmoid", "kto", "orpo"] if case.adapter == "none" else ["ipo"]
    sections = [{**PLAIN[name][0]} for name in names]
    if case.adapter == "lora":
        sections = [{**section, "reference": "adapter_off"} for section in sections]
    whole = split.whole_model(case, tmp_path / "whole")
    alone = [of_answers(whole, Mesh(), method_of(section)) for section in sections]
    asked_alone = asked(whole, Mesh())

    def work(rank: int) -> None:
        mesh, expected_of = case.mesh_of(rank, processes), dict(asked_alone)
        root = split.split_model(case, mesh, whole, tmp_path / "whole")
        for section, one in zip(sections, alone, strict=True):
            compare(one, root, mesh, section)
        found_of = asked(root, mesh)
        for name in ("losses", "nats"):
            assert found_of.pop(name) == pytest.approx(expected_of.pop(name), rel=2e-6)
        assert found_of == expected_of

    assert run_ranks(processes, tmp_path, work) == [0] * processes


@pytest.mark.multi
def test_a_reward_model_has_its_score_whole_on_every_process(tmp_path: Path) -> None:
    case, config = split.Split("llama"), cast(Any, family_config("llama", tied=False))
    config.num_labels = 1
    config.save_pretrained(tmp_path)
    spec, section = ModelSpec(str(tmp_path), random_init=True, head="score"), {"kind": "reward"}
    whole = assemble(case.assembly, build_model(spec, torch.float32, 1))
    alone = of_answers(whole, Mesh(), method_of(section))

    def work(rank: int) -> None:
        mesh = case.mesh_of(rank, 2)
        root = assemble(
            case.assembly, meta_model(model_config(spec), torch.float32, "score"), meshes=mesh.device_meshes("cpu"),
            give_values=lambda root: materialise(root, whole if rank == 0 else None, torch.device("cpu")),
        )
        score: Any = head_layer(root.model)
        assert root.parts.vocabulary is None and score.weight.shape == head_layer(whole.model).weight.shape
        compare(alone, root, mesh, section)

    assert run_ranks(2, tmp_path, work) == [0, 0]
