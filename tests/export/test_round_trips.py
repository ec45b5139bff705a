"""Every architecture, tied and untied, in full and merged, from 1, 2 and 4 ranks: the export is the trained model."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from tests.export.mixtures import merged_state
from tests.export.runs import LORA, PROMPTS, answers, checkpoint_facts, recorded_probe, train_a_little, write_tokenizer
from tests.fixtures.processes import run_ranks
from tests.fixtures.tables import cases
from tests.model.tiny import FAMILIES, family_model
from tuner.api.exports import export_hf
from tuner.checkpoint.save import CheckpointDir, save
from tuner.export import verify
from tuner.export.verify import last_logits
from tuner.export.weights import DTYPES
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.root import CausalLM, trained_parameters

pytestmark = [pytest.mark.multi, pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_check")]
CASES = [(family, tied, lora) for family in FAMILIES for tied in (False, True) for lora in (None, LORA)]
FORMS = [("fp32", 1), ("fp32", 2), ("fp32", 4), ("bf16", 4)]
"""The type of an export, and how many ranks saved the checkpoint: that shows before anything is rounded."""
QUICK: Any = cases(__file__, "quick")
"""What each run of the tests takes: every form of the first family; of others weights as they are, and some that are
rounded with an adapter: transposed ones, tied ones, and experts."""


MOVED = {None: 0.05, LORA: 0.2}
"""How far training moves each parameter."""


@dataclass
class Case:
    """A trained model and its run directory, with a checkpoint `step-N` of N ranks."""

    base: PreTrainedModel
    trained: PreTrainedModel
    run: Path


def name_of(given: tuple[Any, ...]) -> str:
    if len(given) == 2:
        return f"{given[0]}-{given[1]}"
    family, tied, lora = given
    return f"{family}-{'tied' if tied else 'untied'}-{'lora' if lora else 'full'}"


NAMES = {f"{name_of(case)}-{name_of(form)}": (case, form) for case in CASES for form in FORMS}
CHOSEN = [pytest.param(*NAMES[n], id=n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]


def build(directory: Path, family: str, tied: bool, lora: LoraSpec | None) -> Case:
    base = family_model(family, tied)
    base.save_pretrained(directory / "base")
    trained = build_model(ModelSpec(str(directory / "base")), torch.float32, seed=0)
    if lora is not None:
        add_lora(trained, lora, seed=0)
    train_a_little(trained, MOVED[lora])
    trained.train(False)
    run = directory / "run"
    trained.config.save_pretrained(run / "model_config")
    write_tokenizer(run / "tokenizer")
    return Case(base, trained, run)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """The cases of this session, saved by the numbers of ranks that are wanted: a group of each, forked with them."""
    place = tmp_path_factory.mktemp("round-trips")
    items = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]  # type: ignore[attr-defined]
    saved_by = {(name_of(params["case"]), params["form"][1]) for params in items}
    wanted = {name_of(params["case"]): params["case"] for params in items}
    built = {name: (build(place / name, *case), case[2]) for name, case in wanted.items()}

    def save_all(rank: int) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        for case, lora in (each for name, each in built.items() if (name, ranks) in saved_by):
            tensors = {
                f"model/{name}": distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                for name, parameter in trained_parameters(CausalLM(case.trained)).items()
            }
            section = {"name_or_path": str(case.run.parent / "base"), "dtype": "fp32", "config": {}}
            base = case.run.parent / "base"
            facts = checkpoint_facts(case.run, base, case.trained, lora, section) | {"world_size": ranks}
            probe = recorded_probe(case.trained) if rank == 0 else None
            save(CheckpointDir(case.run / "checkpoints", "r"), ranks, tensors, {"step": ranks}, facts, probe)

    for ranks in sorted({ranks for _, ranks in saved_by}):
        assert run_ranks(ranks, place, save_all) == [0] * ranks
    yield {name: case for name, (case, _) in built.items()}


def unit_spread(*logits: torch.Tensor) -> list[torch.Tensor]:
    """Logits divided by the spread of the first ones."""
    return [one / logits[0].std(-1, keepdim=True).mean() for one in logits]


@pytest.mark.parametrize(("case", "form"), CHOSEN)
def test_the_export_is_the_trained_model(
    cases: dict[str, Case], tmp_path: Path, case: tuple[str, bool, LoraSpec | None], form: tuple[Any, int]
) -> None:
    run, lora, (short, ranks) = cases[name_of(case)], case[2], form
    dtype = DTYPES[short]
    report = export_hf(run.run / "checkpoints" / f"step-{ranks}", tmp_path / "export", dtype=short)
    published = load_file(report.path / "model.safetensors")
    merged = copy.deepcopy(run.base)
    merged.load_state_dict(merged_state(run.trained))
    merged.to(dtype).save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")  # as transformers itself saves it
    assert published.keys() == expected.keys()
    assert all(torch.equal(published[name], expected[name]) for name in expected)
    got = answers(report.path)
    assert torch.equal(got, answers(tmp_path / "expected"))
    trained, base = (last_logits(model, PROMPTS) for model in (run.trained, run.base))
    same, other = (verify.compare(*unit_spread(trained, logits)) for logits in (got, base))
    if dtype == torch.float32:
        assert same.relative <= (1e-5 if lora else 0.0) < 1e-2 < other.relative
    else:
        assert report.kept is not None and report.kept > 0.9  # noqa: PLR2004
        assert same.relative < other.relative / 3
