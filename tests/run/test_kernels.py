"""Whose kernels compute: measured once by rank 0 and kept; a run that is resumed keeps what its checkpoint names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model.tiny import VOCAB, tiny_config
from tuner.config.load import load_recipe
from tuner.model import fastest
from tuner.model.fastest import Fastest
from tuner.model.output_layer import softmax_into_gradient
from tuner.run.parts import kernels
from tuner.run.parts.kernels import LEAST_STEPS, Kernels
from tuner.run.parts.listed import parts_of
from tuner.runtime.console import Console
from tuner.setup.resolve import Resolved

FOURTH = Fastest("flash attention 4", {"flash attention 2": 9.7, "flash attention 4": 5.1}, {})


class Ranks:
    """Rank 0 of a group that no other is in."""

    def __init__(self, group: object) -> None:
        pass

    def on_rank0(self, work: Any) -> Any:
        return work()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each measurement that is made."""
    found: list[int] = []

    def measured(config: Any, device: torch.device, cache: Path, tokens: int) -> Fastest:
        found.append(tokens)
        return FOURTH

    monkeypatch.setattr(kernels, "Collective", Ranks)
    monkeypatch.setattr(kernels, "gloo_group", lambda: None)
    monkeypatch.setattr(fastest, "fastest_version", measured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def launch(
    cache: Path, monkeypatch: pytest.MonkeyPatch, steps: int = LEAST_STEPS, state: dict[str, Any] | None = None,
    device: str = "cuda", kernel: str = "auto", precision: str = "bf16",
) -> tuple[Kernels, Resolved]:  # fmt: skip
    tree = {
        "model": {"name_or_path": "owner/name", "kernels": kernel}, "data": {"train": "r.jsonl", "max_length": 64},
        "train": {"precision": precision},
    }  # fmt: skip
    recipe = load_recipe(tree).recipe
    plan = SimpleNamespace(plan=SimpleNamespace(total_steps=steps))
    monkeypatch.setattr(kernels, "timetable", lambda *given: plan)
    facts: Any = SimpleNamespace(kind=device, name="NVIDIA H200")
    resolved = Resolved(recipe, facts, tiny_config("llama"), None, 1, {}, settled={"train.micro_batch_size": 2})  # type: ignore[arg-type]
    checkpoint = None if state is None else SimpleNamespace(state=state)
    ready: Any = SimpleNamespace(
        status=SimpleNamespace(checkpoint=checkpoint), data=None, starts=None, spec=SimpleNamespace(cache_dir=cache),
    )  # fmt: skip
    part = Kernels(recipe)
    return part, part.before_build(ready, resolved, Console(True, "info"))


def test_the_fastest_is_measured_once_said_and_noted(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part, resolved = launch(tmp_path, monkeypatch)
    assert resolved.settled == {"train.micro_batch_size": 2, "attention": "flash attention 4"}
    assert part.state(3) == {"kernels": {"attention": "flash attention 4"}}
    assert "attention: flash attention 4 5.1 ms, flash attention 2 9.7 ms" in capsys.readouterr().err
    assert launch(tmp_path, monkeypatch)[1] == resolved and asked == [64], "what was measured is kept"
    monkeypatch.setattr(kernels, "versions", lambda: {"torch": "other"})
    launch(tmp_path, monkeypatch)
    assert asked == [64, 64], "for the same device, shapes and versions"


@pytest.mark.parametrize(
    ("steps", "device", "state", "taken", "measured"),
    [
        (LEAST_STEPS, "cuda", {"kernels": {"attention": "flash attention 2"}}, "flash attention 2", []),
        (LEAST_STEPS, "cuda", {"kernels": {"attention": "flash attention 3"}}, "flash attention 3", []),
        (LEAST_STEPS, "cuda", {}, FOURTH.name, [64]), (LEAST_STEPS, "cuda", {"kernels": "flash"}, FOURTH.name, [64]),
        (LEAST_STEPS - 1, "cuda", None, None, []), (1000, "cpu", None, None, []),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_its_choice_and_short_runs_and_cpus_make_none(  # noqa: PLR0917 - a table
    steps: int, device: str, state: dict[str, Any] | None, taken: str | None, measured: list[int], asked: list[int],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    part, resolved = launch(tmp_path, monkeypatch, steps, state, device)
    assert (resolved.settled.get("attention"), asked) == (taken, measured)
    assert part.state(9) == ({} if taken is None else {"kernels": {"attention": taken}})


def test_the_loss_is_chosen_too_where_ligers_would_compute_it(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabularies: list[int] = []

    def measured(vocabulary: int, device: torch.device) -> Fastest:
        vocabularies.append(vocabulary)
        return Fastest("torch", {"liger": 2.0, "torch": 1.0}, {})

    monkeypatch.setattr(fastest, "fastest_loss", measured)
    part, resolved = launch(tmp_path, monkeypatch, kernel="liger")
    both = {"attention": "flash attention 4", "loss": "torch"}
    assert {**resolved.settled, **both} == resolved.settled and part.state(1) == {"kernels": both}
    assert "loss: torch 1 ms, liger 2 ms" in capsys.readouterr().err
    launch(tmp_path, monkeypatch, kernel="liger")
    assert vocabularies == [VOCAB], "what was measured is kept"
    for kernel, precision in (("torch", "bf16"), ("liger", "fp16"), ("liger", "fp32")):
        assert "loss" not in launch(tmp_path, monkeypatch, kernel=kernel, precision=precision)[1].settled
    had = {"kernels": {"attention": "flash attention 2"}}  # by a version that chose attention alone
    assert "loss" not in launch(tmp_path, monkeypatch, state=had, kernel="liger")[1].settled


@pytest.mark.parametrize(("speed", "factor", "name"), [(0.5, 1.0, "torch"), (2.0, 1.0, "liger"), (0.5, 1.1, "liger")])
def test_the_fastest_loss_that_is_right_is_taken(
    speed: float, factor: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins: one is so many times as fast as the usual one, and its gradients so many times as large."""
    ran: list[float] = []

    def kernel(took: float, scale: float) -> Any:
        def run(logits: torch.Tensor, *given: Any) -> torch.Tensor:
            ran.append(took)
            loss = softmax_into_gradient(logits, *given)
            logits.mul_(scale)
            return loss

        return run

    monkeypatch.setattr(fastest, "KERNELS", {"liger": kernel(1.0, 1.0), "torch": kernel(speed, factor)})
    monkeypatch.setattr(fastest, "positions_of_chunk", lambda *given: 80)
    monkeypatch.setattr(fastest, "seconds_on", lambda device: lambda work: work() is not None and ran[-1])
    found = fastest.fastest_loss(97, torch.device("cpu"))
    assert found.name == name and ("torch" in found.passed_over) is (factor != 1.0)


def test_a_recipe_for_a_cpu_has_no_such_part() -> None:
    def names(device: str) -> list[str]:
        tree = {"model": {"name_or_path": "m"}, "data": {"train": "r.jsonl"}, "train": {"device": device}}
        return [type(part).__name__ for part in parts_of(load_recipe(tree).recipe)]

    assert "Kernels" in names("auto") and "Kernels" in names("cuda") and "Kernels" not in names("cpu")
