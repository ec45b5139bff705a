"""Kernels that `auto` chose and that do not work here are left out, with a warning; everything else fails as before."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import trainings
from tests.fixtures.processes import run_ranks
from tuner.config.load import load_recipe
from tuner.errors import MemoryLimitError
from tuner.model import blocks
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup import first_kernels, resolve
from tuner.setup.first_kernels import build_runnable
from tuner.setup.resolve import Resolved
from tuner.setup.timetable import Starts

SILENT = Console(main=False)


class Built:
    """What stands for a built model: which kernels it has."""

    rank_info = RankInfo()

    def __init__(self, resolved: Resolved) -> None:
        self.kernels = (resolved.recipe.train.compile, resolved.recipe.model.kernels)
        self.resolved = resolved


def resolved_as(model: Path, chosen: tuple[str, ...]) -> Resolved:
    """A recipe with compiled layers and liger's kernels, of which ``auto`` chose some."""
    tree: dict[str, Any] = {"model": {"name_or_path": str(model)}, "data": {"train": str(model / "config.json")}}
    recipe = load_recipe(tree).recipe
    train = recipe.train.model_copy(update={"compile": True})
    own = recipe.model.model_copy(update={"kernels": "liger"})
    nothing: Any = None
    reasons = dict.fromkeys(chosen, "cuda")
    recipe = recipe.model_copy(update={"train": train, "model": own})
    return Resolved(recipe, nothing, nothing, nothing, 1, reasons)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(first_kernels, "build", lambda resolved, *given: Built(resolved))
    return tmp_path


def runnable(resolved: Resolved) -> Any:
    """What stands for a model that runs; only the stand-in for building it would look at data and tokenizer."""
    nothing: Any = None
    return build_runnable(resolved, nothing, nothing, RankInfo(), Starts(), SILENT)


BOTH = ("train.compile", "model.kernels")


@pytest.mark.parametrize(
    ("chosen", "broken", "tried"),
    [
        (BOTH, "nothing", [(True, "liger")]),
        (BOTH, "compiler", [(True, "liger"), (False, "liger")]),
        (BOTH, "triton", [(True, "liger"), (False, "liger"), (False, "torch")]),
        (("train.compile",), "compiler", [(True, "liger"), (False, "liger")]),
        ((), "nothing", [(True, "liger")]),
    ],
)
def test_one_choice_after_the_other_is_left_out(
    chosen: tuple[str, ...], broken: str, tried: list[Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Built] = []

    def make(resolved: Resolved, *given: Any) -> Any:
        made.append(Built(resolved))
        return made[-1]

    def compute(assembly: Any, console: Console) -> None:
        compiled, kernels = assembly.kernels
        if broken == "triton" and kernels == "liger":
            raise RuntimeError("Triton cannot find libcuda.so\nlook for it")
        if broken == "compiler" and compiled:
            raise ValueError("unsupported")

    let_go: list[int] = []
    monkeypatch.setattr(first_kernels, "_let_go", lambda: let_go.append(len(made)))  # it takes a second
    monkeypatch.setattr(first_kernels, "mock_batch", compute)
    monkeypatch.setattr(first_kernels, "build", make)
    found: Any = runnable(resolved_as(model, chosen))
    assert [one.kernels for one in made] == tried and found is made[-1]
    assert let_go == [*range(1, len(tried))], "what did not run is let go before another is built"
    if broken == "triton":
        assert found.resolved.reasons["model.kernels"] == "RuntimeError: Triton cannot find libcuda.so look for it"


def test_what_was_asked_for_is_not_tried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(first_kernels, "mock_batch", never)
    made: Any = runnable(resolved_as(model, ()))
    assert made.kernels == (True, "liger")


@pytest.mark.parametrize(("chosen", "tried", "first"), [(BOTH, [True], []), ((), [], [True])])
def test_that_compiling_takes_a_while_is_said_before_it_begins(
    chosen: tuple[str, ...], tried: list[bool], first: list[bool], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is tried before training, and where it is left to the first step."""
    said: list[tuple[str, bool]] = []

    @contextmanager
    def doing(console: Console, text: str, at_once: bool = False) -> Iterator[None]:
        said.append((text, at_once))
        yield

    monkeypatch.setattr(Console, "doing", doing)
    monkeypatch.setattr(Console, "say", lambda console, label, text: said.append((text, True)))
    monkeypatch.setattr(first_kernels, "mock_batch", lambda *given: None)
    runnable(resolved_as(model, chosen))
    words = "compiling the decoder layers, a minute or two"
    assert [at_once for text, at_once in said if text == words] == tried
    assert [at_once for text, at_once in said if text == f"the first step is spent {words}"] == first


def test_memory_is_no_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise MemoryLimitError("a micro-batch of 4,096 tokens does not fit into memory")

    monkeypatch.setattr(first_kernels, "mock_batch", full)
    made: Any = runnable(resolved_as(model, BOTH))
    assert made.kernels == (True, "liger"), "it is explained where a step's record can be read"
    monkeypatch.setattr(Built, "rank_info", RankInfo(1, 2, 1, 2))
    with pytest.raises(MemoryLimitError):
        runnable(resolved_as(model, BOTH))


@pytest.mark.multi
@pytest.mark.parametrize("failing", [2, 1])
def test_processes_leave_kernels_out_together_or_not_at_all(
    failing: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_kernels, "WAIT_S", 1.0)

    def work(rank: int) -> None:
        def compute(assembly: Any, console: Console) -> None:
            if rank < failing and assembly.kernels[0]:
                raise RuntimeError("no compiler")
            if rank >= failing:
                time.sleep(2)  # in a collective that the other never joins

        monkeypatch.setattr(first_kernels, "mock_batch", compute)
        try:
            made: Any = runnable(resolved_as(model, ("train.compile",)))
            assert made.kernels == (failing < 2, "liger")
        except RuntimeError as error:
            assert (failing, rank, str(error)) == (1, 0, "no compiler")

    assert run_ranks(2, model, work) == [0, 0]


def test_a_run_whose_layers_cannot_be_compiled_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    flags = {"data__packing": "true", "train__stop_after": "1 step"}
    plain = trainings.launch(tmp_path, name="plain", train__compile="false", **flags)

    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise RuntimeError("gcc: fatal error: no input files")

    monkeypatch.setattr(blocks, "BACKEND", broken)
    monkeypatch.setattr(resolve, "_compiled", lambda *given: (True, "cuda"))
    said: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda console, text: said.append(text))
    run = trainings.launch(tmp_path, name="auto", train__compile="auto", **flags)
    assert [line["loss"] for line in trainings.lines(run.run_dir)] == [
        line["loss"] for line in trainings.lines(plain.run_dir)
    ]
    (warning,) = [text for text in said if text.startswith("train.compile")]
    assert "gcc: fatal error" in warning and warning.endswith("the run continues without, slower and with more memory")
    assert "compile: false" in (run.run_dir / "recipe.resolved.yaml").read_text()
    with pytest.raises(Exception, match="gcc: fatal error"):
        trainings.launch(tmp_path, name="asked", train__compile="true", **flags)
