"""Methods that look at whole documents equal a plain loop over them: full and LoRA, accumulated, on two processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM

from tests.multi.launcher import run_cases
from tests.multi.own_methods import ALPHA, BETA, reference
from tests.multi.test_parity import ADAPTERS, ONE
from tests.train.synthetic import SyntheticRows, assembly_for, recipe_for, write_model
from tuner.runtime.dist import RankInfo

OWN = Path(__file__).with_name("own_methods.py")
METHODS: dict[str, dict[str, Any]] = {
    "token": {"kind": "sft"},
    "document": {"kind": "sft", "reduction": "document"},
    "sqrt": {"kind": "sft", "reduction": "sqrt"},
    "averaged": {"kind": "custom", "use": f"{OWN}:Averaged"},
    "preferred": {"kind": "custom", "use": f"{OWN}:Preferred"},
    "distilled": {"kind": "distill", "teacher": "TEACHER", "beta": 0.4, "temperature": 1.5, "ce_weight": 0.25},
    "reward": {"kind": "reward", "center": 0.01},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one, 4 micro-batches": {"micro": 2}, "two, 4 micro-batches": {"world": 2, "local": 2, "micro": 1}
}
CASES = [(method, "full", layout) for method in METHODS for layout in LAYOUTS]
CASES += [
    (method, "lora", layout)
    for method in ("document", "averaged", "distilled", "reward")
    for layout in list(LAYOUTS)[1:]
]
# Of two processes, what others of these show too: `make campaign` takes them.
ALIKE = (("document", "full"), ("sqrt", "full"), ("averaged", "lora"), ("distilled", "lora"), ("reward", "lora"))
if "TUNER_TEST_EVERY_ROW" not in os.environ:
    CASES = [case for case in CASES if case[:2] not in ALIKE or "two" not in case[2]]
STEPS = 2
TRAINED = [5, 2, 0, 0, 0, 0, 20, 7, 25]  # of 9 rows, 8 a step: in the second one of two processes has none
Losses = list[tuple[int, torch.Tensor]]
"""Of each document its number and the losses of its trained tokens."""


def mean_by(share: Callable[[int], float]) -> Callable[[Losses], torch.Tensor]:
    def mean(found: Losses) -> torch.Tensor:
        trained = [losses for _, losses in found if len(losses)]
        total = sum((share(len(losses)) * losses.mean() for losses in trained), start=torch.zeros(()))
        return total / sum(share(len(losses)) for losses in trained)

    return mean


def preferred(found: Losses) -> torch.Tensor:
    margins = [-losses.sum() - float(reference(np.array(number))) for number, losses in found]
    pairs = [-logsigmoid(BETA * (a - b)) for a, b in zip(margins[::2], margins[1::2], strict=True)]
    nll = torch.cat([losses for _, losses in found[::2]])
    return torch.stack(pairs).mean() + ALPHA * nll.sum() / max(1, len(nll))


PLAIN = {
    "token": mean_by(lambda n: n), "document": mean_by(lambda n: 1), "sqrt": mean_by(lambda n: n**0.5),
    "averaged": mean_by(lambda n: 1), "preferred": preferred,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all cases gave; the worker that runs them is started once."""
    directory = tmp_path_factory.mktemp("methods")
    write_model(directory)
    write_model(directory / "teacher", "llama")  # whose output layer is a matrix of its own
    METHODS["distilled"]["teacher"] = str(directory / "teacher")
    common = {**ONE, "steps": STEPS, "trained": TRAINED, "model": str(directory)}
    cases = [
        {**common, **LAYOUTS[layout], "name": f"{method}, {adapter}, {layout}"}
        | {"adapter": ADAPTERS[adapter], "method": METHODS[method]}
        for method, adapter, layout in CASES
    ]
    run_cases(cases, directory)
    return directory


@pytest.fixture(scope="module")
def looped(found: Path) -> dict[str, list[tuple[float, torch.Tensor]]]:
    """Loss and gradients of every step, document by document, by the model's own forward with stock attention."""
    results: dict[str, list[tuple[float, torch.Tensor]]] = {}
    for adapter in ADAPTERS:
        recipe = recipe_for(
            found, adapter=ADAPTERS[adapter], train={"global_batch_size": ONE["global"]},
            data={"shuffle": False, "train": str(found / "rows.jsonl")},
        )  # fmt: skip
        assembly = assembly_for(recipe, TRAINED, RankInfo())
        model, parameters = assembly.train_state.root.model, assembly.train_state.parameters
        model.train().set_attn_implementation("eager")
        rows = SyntheticRows(TRAINED)
        methods = [name for name in METHODS if any(case[:2] == (name, adapter) for case in CASES)]
        if "reward" in methods:
            results[f"reward, {adapter}"] = looped_rewards(found, adapter)
        teacher = AutoModelForCausalLM.from_pretrained(found / "teacher", attn_implementation="eager")

        def plainly(
            method: str, ids: list[int], model: Any = model, rows: Any = rows, teacher: Any = teacher
        ) -> torch.Tensor:
            if method == "distilled":
                return distilled([torch.cat([logits_of(each, rows, i) for i in ids]) for each in (model, teacher)], ids)
            return PLAIN[method]([one for i in ids for one in losses_of(model, rows, i)])

        for method in (name for name in methods if name != "reward"):
            steps = results[f"{method}, {adapter}"] = []
            for step in range(STEPS):
                loss = plainly(method, assembly.batches.row_ids(step).tolist())
                gradients = torch.autograd.grad(loss, list(parameters.values()))
                named = dict(zip(parameters, gradients, strict=True))
                steps.append((loss.item(), torch.cat([named[name].flatten() for name in sorted(named)])))
    return results


def distilled(both: list[torch.Tensor], ids: list[int]) -> torch.Tensor:
    """The method's mean over trained tokens, of the logits of student and teacher at these."""
    how, targets = METHODS["distilled"], torch.cat([targets_of(SyntheticRows(TRAINED).row(i)) for i in ids])
    s, t = ((logits / how["temperature"]).softmax(-1) for logits in (both[0], both[1].detach()))
    m = how["beta"] * t + (1 - how["beta"]) * s
    kl_t, kl_s = (t * (t / m).log()).sum(), (s * (s / m).log()).sum()
    divergence = how["temperature"] ** 2 * (how["beta"] * kl_t + (1 - how["beta"]) * kl_s)
    ce = cross_entropy(both[0], targets, reduction="sum")
    loss: torch.Tensor = ((1 - how["ce_weight"]) * divergence + how["ce_weight"] * ce) / len(targets)
    return loss


def parts_of(row: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids of each document, and which of them are trained, the first one out."""
    stops = np.cumsum(row.lengths)
    parts = [slice(stop - length, stop) for stop, length in zip(stops, row.lengths, strict=True)]
    return [(torch.as_tensor(row.input_ids[part]), torch.as_tensor(row.trained[part])[1:]) for part in parts]


def targets_of(row: Any) -> torch.Tensor:
    return torch.cat([ids[1:][trained] for ids, trained in parts_of(row)])


def logits_of(model: Any, rows: SyntheticRows, row_id: int) -> torch.Tensor:
    """At the trained positions of a row, each document by itself."""
    parts = parts_of(rows.row(row_id))
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0, :-1][trained] for ids, trained in parts])


def looped_rewards(directory: Path, adapter: str) -> list[tuple[float, torch.Tensor]]:
    """The same of a reward model: each row is a pair, of which transformers' class scores one answer at a time."""
    recipe = recipe_for(
        directory, adapter=ADAPTERS[adapter], train={"global_batch_size": ONE["global"]}, method=METHODS["reward"],
        data={"shuffle": False, "train": str(directory / "rows.jsonl")},
    )  # fmt: skip
    assembly = assembly_for(recipe, TRAINED, RankInfo())
    model: Any = assembly.train_state.root.model
    model.train().set_attn_implementation("eager")
    parameters, rows, steps = assembly.train_state.parameters, SyntheticRows(TRAINED), []
    for step in range(STEPS):
        losses = []
        for row in (rows.row(int(i)) for i in assembly.batches.row_ids(step)):
            answers = torch.as_tensor(row.input_ids).split(row.lengths.tolist())
            chosen, rejected = (model(input_ids=ids[None], use_cache=False).logits[0, 0] for ids in answers)
            losses.append(-logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2)
        loss = torch.stack(losses).mean()
        named = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        steps.append((loss.item(), torch.cat([named[name].flatten() for name in sorted(named)])))
    return steps


def losses_of(model: Any, rows: SyntheticRows, row_id: int) -> Losses:
    row, result, start = rows.row(row_id), [], 0
    for number, length in zip(row.documents, row.lengths, strict=True):
        part = slice(start, start + int(length))
        ids, trained = torch.as_tensor(row.input_ids[part]), torch.as_tensor(row.trained[part])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        result.append((int(number), cross_entropy(logits[:-1], ids[1:], reduction="none")[trained[1:]]))
        start += int(length)
    return result


@pytest.mark.multi
@pytest.mark.parametrize(("method", "adapter", "layout"), CASES)
def test_equals_a_plain_loop_over_documents(
    found: Path, looped: dict[str, list[tuple[float, torch.Tensor]]], method: str, adapter: str, layout: str
) -> None:
    name = f"{method}, {adapter}, {layout}"
    facts, tensors = json.loads((found / f"{name}.json").read_text()), load_file(found / f"{name}.safetensors")
    expected = looped[f"{method}, {adapter}"]
    assert len(facts["loss"]) == len(expected) == STEPS
    for step, (loss, wanted) in enumerate(expected):
        keys = sorted(key for key in tensors if key.startswith(f"{step}."))
        got = torch.cat([tensors[key].flatten() for key in keys])
        assert facts["loss"][step] == pytest.approx(loss, rel=1e-5)
        assert wanted.norm() > 1e-3
        assert (got - wanted).norm() <= 1e-5 * wanted.norm(), step


def test_the_means_differ(looped: dict[str, list[tuple[float, torch.Tensor]]]) -> None:
    first = {method: looped[f"{method}, full"][0] for method in ("token", "document", "sqrt")}
    assert len({round(loss, 4) for loss, _ in first.values()}) == 3
    token, document, sqrt = (gradients / gradients.norm() for _, gradients in first.values())
    assert (token - document).norm() > (token - sqrt).norm() > 1e-2


@pytest.mark.multi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_have_counts_of_their_own(found: Path, layout: str) -> None:
    def facts(method: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((found / f"{method}, full, {layout}.json").read_text())
        return read

    averaged, token, preferred = facts("averaged"), facts("token"), facts("preferred")
    assert [f["token_loss"] for f in averaged["figures"]] == pytest.approx(token["loss"], rel=1e-5)
    for loss, figures in zip(preferred["loss"], preferred["figures"], strict=True):
        assert list(figures) == ["preference", "nll", "accuracy"]
        assert loss == pytest.approx(figures["preference"] + figures["nll"], rel=1e-6)
        assert 0 <= figures["accuracy"] <= 1


@pytest.mark.multi
@pytest.mark.parametrize("method", [method for method, *rest in CASES if rest == ["full", "two, 4 micro-batches"]])
def test_no_method_adds_a_collective(found: Path, method: str) -> None:
    facts = json.loads((found / f"{method}, full, two, 4 micro-batches.json").read_text())
    assert facts["collectives"]["allreduce"] == 1
