"""What becomes of `auto`, given the device and what is installed.

What is computed in is chosen by the device, and refused where it has no units; frozen weights go with it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig

from tests.model.tiny import tiny_config
from tests.train.synthetic import MAX_LENGTH, recipe_for
from tuner.errors import ExitCode, MachineError, RecipeError
from tuner.profile.devices import find_device
from tuner.profile.estimate import HALF_REACHED, REACHED, Sizes, StepSetting, computing
from tuner.runtime.device import DeviceFacts
from tuner.runtime.dist import RankInfo
from tuner.setup.machine_torch import _computes
from tuner.setup.resolve import Resolved, resolve
from tuner.setup.specs import step_config_of, step_sections

GIB = 2**30
NO_CXX = "there is no C++ compiler (g++)"
NO_CC = "there is no C compiler (gcc, clang)"
NO_HEADERS = "Python's headers are not installed (Python.h)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_config("llama").save_pretrained(tmp_path)
    return tmp_path


def resolved_on(
    kind: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None = None, **sections: dict[str, Any]
) -> Resolved:
    """Resolved on a device, where there is a ``problem`` with the C++ compiler, or with more than that."""
    facts = DeviceFacts(kind, "a device", 8 * GIB, 8 * GIB, True, 1)
    monkeypatch.setattr("tuner.setup.resolve.device_facts", lambda *_: facts)
    monkeypatch.setattr("tuner.setup.resolve.compiler_problem", lambda kind: problem)
    more = None if problem == NO_CXX else problem
    monkeypatch.setattr("tuner.setup.resolve.triton_problem", lambda: more)
    monkeypatch.setattr("tuner.setup.resolve.has_liger", lambda kind: True)
    sections["train"] = {"device": "auto", **sections.get("train", {})}
    return resolve(recipe_for(directory, **sections), MAX_LENGTH, RankInfo())


@pytest.mark.parametrize(
    ("kind", "problem", "sections", "compiled", "kernels", "why"),
    [
        ("cpu", None, {}, False, "native", "cpu"),
        ("cuda", None, {}, True, "liger", "cuda"),
        ("cuda", NO_CXX, {}, False, "liger", NO_CXX),
        ("cuda", NO_CC, {}, False, "torch", NO_CC),
        ("cuda", NO_HEADERS, {}, False, "torch", NO_HEADERS),
        ("cuda", NO_HEADERS, {"model": {"kernels": "torch"}}, False, "torch", NO_HEADERS),
        ("cuda", None, {"data": {"packing": False}}, False, "liger", "rows of many lengths"),
        ("cuda", None, {"train": {"compile": False}}, False, "liger", None),
        ("cpu", None, {"train": {"compile": True}}, True, "native", None),
    ],
)
def test_layers_are_compiled_where_that_can_be(
    kind: str,
    problem: str | None,
    sections: dict[str, dict[str, Any]],
    compiled: bool,
    kernels: str,
    why: str | None,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = resolved_on(kind, model, monkeypatch, problem, **sections)
    assert (found.recipe.train.compile, found.recipe.model.kernels) == (compiled, kernels)
    assert found.reasons.get("train.compile") == why
    if kernels == "torch" and "model" not in sections:
        assert found.reasons["model.kernels"] == f"no liger: {problem}"


@pytest.mark.parametrize(("wish", "is_whole"), [("auto", False), ("sharded", False), ("whole", True)])
def test_gradients_are_kept_whole_between_micro_batches_only_where_that_is_written(
    wish: str, is_whole: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolved_on("cuda", model, monkeypatch, parallel={"accumulate": wish})
    assert found.recipe.parallel.accumulate == ("whole" if is_whole else "sharded")
    assert step_config_of(found, torch.device("cpu"), RankInfo()).accumulate_whole == is_whole


@pytest.mark.parametrize("problem", [NO_CC, NO_HEADERS])
def test_liger_that_was_asked_for_and_cannot_be_compiled_is_refused(
    problem: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError) as caught:
        resolved_on("cuda", model, monkeypatch, problem, model={"kernels": "liger"})
    assert caught.value.message == f"model.kernels: liger: {problem}"
    assert caught.value.hint == "apt install g++ python3-dev; pip install triton, or write kernels: torch"


def test_what_this_machine_lacks_says_nothing_of_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.setup.resolve.triton_problem", lambda: NO_CC)
    monkeypatch.setattr("tuner.setup.resolve.has_liger", lambda kind: True)
    there = DeviceFacts("cuda", "another's device", 8 * GIB, 8 * GIB, True, 1)
    recipe = recipe_for(model, train={"device": "auto", "compile": False})
    assert resolve(recipe, MAX_LENGTH, RankInfo(), facts=there).recipe.model.kernels == "liger"


def test_a_missing_compiler_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"train.compile: there is no C\+\+ compiler \(g\+\+\)") as caught:
        resolved_on("cpu", model, monkeypatch, "there is no C++ compiler (g++)", train={"compile": True})
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert caught.value.hint == "install what is missing, or write compile: false"


def test_a_cpu_without_a_c_compiler_computes_with_torch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.setup.resolve.native_problem", lambda: "there is no C compiler (cc, gcc, clang)")
    found = resolved_on("cpu", model, monkeypatch, None)
    assert found.recipe.model.kernels == "torch"
    assert found.reasons["model.kernels"] == "there is no C compiler (cc, gcc, clang)"


def test_native_kernels_are_for_the_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="native kernels are for the CPU"):
        resolved_on("cuda", model, monkeypatch, None, model={"kernels": "native"})


def test_a_task_that_sees_one_device_is_resolved_for_that(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def facts(kind: str, index: int) -> DeviceFacts:
        asked.append(index)
        return DeviceFacts("cpu", "a device", 8 * GIB, 8 * GIB, True, 1)

    monkeypatch.setattr("tuner.setup.resolve.device_facts", facts)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    resolve(recipe_for(model), MAX_LENGTH, RankInfo(3, 8, 3, 8))
    assert asked == [0]


def bloom(directory: Path) -> Path:
    """The config of a model whose documents cannot lie end to end, as its class tells."""
    BloomConfig(vocab_size=260, hidden_size=16, n_layer=1, n_head=2).save_pretrained(directory)
    return directory


WHY = "BloomForCausalLM has attention of its own"


def test_documents_that_cannot_lie_end_to_end_are_a_padded_batch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = resolved_on("cuda", model, monkeypatch, data={"packing": "auto"})
    assert (flat.route, flat.reasons["data.packing"]) == ("flat", "documents end to end")
    assert flat.recipe.train.compile is True
    apart = f"documents as a padded batch: {WHY}"
    found = resolved_on("cuda", bloom(tmp_path), monkeypatch, data={"packing": "auto"})
    assert (found.route, found.recipe.data.packing, found.recipe.train.compile) == ("batch", "auto", False)
    assert [found.reasons[key] for key in ("packing", "data.packing", "train.compile")] == [apart] * 3
    assert "attention" not in found.reasons
    several = resolved_on("cpu", tmp_path, monkeypatch, data={"packing": False}, train={"micro_batch_size": 2})
    assert (several.route, several.reasons["packing"]) == ("batch", apart)
    alone = resolved_on("cpu", tmp_path, monkeypatch, data={"packing": False}, train={"micro_batch_size": 1})
    assert (alone.route, alone.reasons.get("packing")) == ("flat", None)


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        ({"data": {"packing": True}}, "data.packing: true", "write data.packing: auto"),
        ({"train": {"compile": True}}, "train.compile", "write compile: auto"),
    ],
)
def test_end_to_end_that_is_demanded_and_cannot_be_is_refused(
    sections: dict[str, dict[str, Any]], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=f"{message}: .*cannot lie end to end: {WHY}") as caught:
        resolved_on("cuda", bloom(tmp_path), monkeypatch, **sections)
    assert hint in str(caught.value.hint)


T4 = DeviceFacts("cuda", "Tesla T4", 15 * GIB, 15 * GIB, False, 1, 7)
P100 = DeviceFacts("cuda", "Tesla P100", 16 * GIB, 16 * GIB, False, 1, 6)
A100, H100, L4 = (find_device(name).facts() for name in ("a100-80g", "h100-80g", "l4-24g"))
OLD_CPU = DeviceFacts("cpu", "a processor", 8 * GIB, 8 * GIB, False, 1)
LORA: dict[str, Any] = {"kind": "lora"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama").save_pretrained(directory)
    return directory


def resolved(tiny: Path, facts: DeviceFacts, precision: str = "auto", **sections: dict[str, Any]) -> Resolved:
    recipe = recipe_for(tiny, train={"device": "auto", "precision": precision}, **sections)
    return resolve(recipe, MAX_LENGTH, RankInfo(), facts=facts)


@pytest.mark.parametrize(
    ("facts", "precision"), [(T4, "fp16"), (P100, "fp32"), (A100, "bf16"), (H100, "bf16"), (OLD_CPU, "fp32")]
)
def test_auto_is_what_the_device_is_fast_at(tiny: Path, facts: DeviceFacts, precision: str) -> None:
    found = resolved(tiny, facts)
    assert found.recipe.train.precision == precision
    if facts is T4:
        assert found.reasons["train.precision"] == "Tesla T4 has fp16 units and none for bf16; the loss is scaled"
        assert found.recipe.train.compile is True


@pytest.mark.parametrize(
    ("facts", "precision", "dtype"),
    [(T4, "fp16", "bf16"), (OLD_CPU, "fp16", "fp32"), (H100, "fp8", "bf16"), (OLD_CPU, "fp8", "bf16")],
)
def test_frozen_weights_are_as_checkpoints_have_them(
    tiny: Path, facts: DeviceFacts, precision: str, dtype: str
) -> None:
    found = resolved(tiny, facts, precision, adapter=LORA)
    assert found.recipe.model.dtype == dtype
    if facts is T4:
        assert (found.recipe.train.compile, found.recipe.model.kernels) == (False, "torch")


@pytest.mark.parametrize("facts", [H100, L4, OLD_CPU])
def test_fp8_says_which_layers(tiny: Path, facts: DeviceFacts) -> None:
    assert resolved(tiny, facts, "fp8").reasons["fp8"] == "products of 14 of the decoder's 14 linear layers"


@pytest.mark.parametrize("facts", [A100, T4])
def test_fp8_is_refused_without_units_for_it(tiny: Path, facts: DeviceFacts) -> None:
    with pytest.raises(MachineError, match=f"train.precision: fp8: {facts.name} has no units for it") as caught:
        resolved(tiny, facts, "fp8")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "write precision: auto" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("facts", "units"),
    [(P100, "fp32"), (T4, "fp32, fp16"), (A100, "fp32, bf16, fp16"), (H100, "fp32, bf16, fp16, fp8")],
)
def test_a_doctor_says_what_there_are_units_for(facts: DeviceFacts, units: str) -> None:
    assert _computes(facts) == units


@pytest.mark.parametrize(("precision", "times"), [("bf16", 1.0), ("fp16", 1.0), ("fp32", 2.0), ("fp8", 0.8)])
def test_the_estimated_time_goes_by_precision(tiny: Path, precision: str, times: float) -> None:
    """In fp8 four fifths of the arithmetic take three quarters of the time."""
    parts = {"layers": 8e15, "attention": 1e15, "head": 1e15}
    batch = SimpleNamespace(lengths=(8192,), trained_positions=range(8192))
    work: Any = SimpleNamespace(batches=SimpleNamespace(micro=[batch]), tokens_per_row=8192, extra_forwards=0)
    flops: Any = SimpleNamespace(parts=lambda lengths, trained: dict(parts))
    train = {"precision": precision, "gradient_checkpointing": "none", "micro_batch_size": 1, "global_batch_size": 1}
    place = StepSetting(find_device("h100-80g"), RankInfo(), work)
    sections = step_sections(SimpleNamespace(recipe=recipe_for(tiny, train=train)))  # type: ignore[arg-type]
    found = computing(sections, flops, Sizes(1, 64, 0, ()), place)
    reached = 989.4e12 * REACHED * 8192 / (8192 + HALF_REACHED)
    assert found.seconds == pytest.approx(times * 1e16 / reached, rel=5e-3)
