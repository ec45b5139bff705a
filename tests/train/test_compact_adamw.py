"""AdamW with moments in 8 bits or stochastic rounding: its formula, its kernels, its parts and what it leaves out;
the rounding itself.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.fixtures import tables, trainings
from tests.fixtures.commands import printed
from tests.fixtures.trainings import launch
from tests.train.compact_parts import KINDS, MAPS, PLAIN, made_part, rows_alone, tensors
from tuner.config.load import load_recipe
from tuner.config.optimizers import Optimizer
from tuner.errors import RecipeError
from tuner.model.native.library import native_problem
from tuner.run.options import LaunchOptions
from tuner.train import compact_adamw, moments
from tuner.train.compact_adamw import mixed, name_keys, noise, rounded, step_keys
from tuner.train.moments import MomentPart, Step, decode, encode
from tuner.train.optimizer import OptimizerSet, build_optimizer, coded_matrices

SECTIONS: TypeAdapter[Any] = TypeAdapter(Optimizer)
SHAPES = {
    "embed.weight": (80, 64), "layer.weight": (20, 300), "layer.bias": (20,), "experts.up": (3, 50, 40),
    "small.weight": (6, 40),
}
EMBEDDINGS = frozenset({"embed.weight"})
CODED = {"layer.weight", "experts.up"}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator) * torch.rand(SHAPES[name], generator=generator) ** 6


def built(own: dict[str, nn.Parameter], **values: Any) -> OptimizerSet:
    section = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.3, **values}
    return build_optimizer(SECTIONS.validate_python(section), own, EMBEDDINGS, EMBEDDINGS, seed=5)


def take(updater: OptimizerSet, own: dict[str, nn.Parameter], steps: range, bad: torch.Tensor | None = None) -> None:
    for step in steps:
        for name, parameter in own.items():
            parameter.grad = gradient(name, step).to(parameter.dtype)
        updater.set_factor(1 / (step + 1))
        updater.step(bad, torch.tensor(2.0))
        updater.zero_grad()


def snapshot(updater: OptimizerSet, own: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in (*own.items(), *updater.state_tensors().items())}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def test_it_is_the_formula_with_what_8_bits_keep() -> None:
    own, before = parameters(), parameters()
    take(updater := built(own, state="8bit"), own, range(3))
    for name in sorted(CODED):
        rows = before[name].detach().reshape(SHAPES[name][0], -1)
        first = second = torch.zeros_like(rows)
        for t in (1, 2, 3):
            g, lr = gradient(name, t - 1).reshape(rows.shape) / 2, 0.01 / t
            first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
            size = (second / (1 - 0.95**t)).sqrt() + 1e-8
            rows = rows * (1 - lr * 0.3) - lr * first / (1 - 0.9**t) / size
            first, second = (decode(*encode(one, codes), codes) for one, codes in ((first, MAPS[0]), (second, MAPS[1])))
        torch.testing.assert_close(own[name].detach().reshape(rows.shape), rows, rtol=1e-4, atol=1e-5)
        codes, scales = (updater.state_tensors()[f"optimizer/exp_avg_{what}/{name}"] for what in ("codes", "scales"))
        kept = decode(codes.reshape(rows.shape), scales, MAPS[0])
        torch.testing.assert_close(kept, first, rtol=2e-2, atol=1e-6)


def test_the_whole_shape_says_what_has_8_bits() -> None:
    own = parameters()
    found = {tuple(name.split("/", 2)[1:]): t for name, t in built(own, state="8bit").state_tensors().items()}
    for name in SHAPES:
        kinds = {moment: t.dtype for (moment, other), t in found.items() if other == name}
        if name in CODED:
            assert kinds == {
                "exp_avg_codes": torch.uint8, "exp_avg_scales": torch.float32, "exp_avg_sq_codes": torch.uint8,
                "exp_avg_sq_scales": torch.float32,
            }
        else:
            assert kinds == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert found["exp_avg_scales", "experts.up"].shape == (3, 8)
    bytes_of = {name: sum(t.numel() * t.element_size() for (_, n), t in found.items() if n == name) for name in CODED}
    assert bytes_of == {"layer.weight": 2 * (6000 + 4 * 20 * 2), "experts.up": 2 * (6000 + 4 * 3 * 8)}
    with pytest.raises(RecipeError, match="no matrix of 4,096 numbers or more is trained") as caught:
        coded_matrices({name: own[name] for name in ("embed.weight", "small.weight", "layer.bias")}, EMBEDDINGS)
    assert caught.value.hint == "write state: fp32"


WAYS: dict[str, dict[str, Any]] = {
    "8bit": {"state": "8bit"},
    "chance": {"rounding": "stochastic", "dtype": torch.bfloat16},
    "both": {"state": "8bit", "rounding": "stochastic", "dtype": torch.bfloat16},
}


def made(way: str) -> tuple[dict[str, nn.Parameter], OptimizerSet]:
    values = dict(WAYS[way])
    own = parameters(values.pop("dtype", torch.float32))
    return own, built(own, **values)


@pytest.mark.parametrize("way", WAYS)
def test_state_taken_over_is_continued_bit_for_bit(way: str) -> None:
    straight, updater = made(way)
    take(updater, straight, range(4))
    own, before = made(way)
    take(before, own, range(2))
    _, after = made(way)
    after = built(own, **{key: value for key, value in WAYS[way].items() if key != "dtype"})
    for name, tensor in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[name])
    after.set_step_count(2)
    take(after, own, range(2, 4))
    assert_same(snapshot(after, own), snapshot(updater, straight))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("done", [0, 1])
def test_a_step_that_is_left_out_changes_nothing(way: str, done: int) -> None:
    own, updater = made(way)
    other, plain = made(way)
    take(updater, own, range(done))
    take(plain, other, range(done))
    before = snapshot(updater, own)
    for parameter in own.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert updater.takes_flag
    updater.step(torch.tensor(True))
    updater.zero_grad()
    assert_same(snapshot(updater, own), before)
    take(updater, own, range(1, 3), torch.tensor(False))
    take(plain, other, range(1, 3), torch.tensor(False))
    assert_same(snapshot(updater, own), snapshot(plain, other))


def test_small_updates_add_up_when_they_are_rounded_by_chance() -> None:
    """Steps of a 40th of what bfloat16 resolves: to the nearest nothing ever moves."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        own = {"layer.weight": nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))}
        updater = built(own, rounding=rounding, weight_decay=0.0, lr=1e-4)
        for _ in range(40):
            own["layer.weight"].grad = torch.full((64, 64), -1.0, dtype=torch.bfloat16)
            updater.set_factor(1.0)
            updater.step()
        moved[rounding] = own["layer.weight"].float().mean().item() - 1
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(40e-4, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(5, 300), (16, 256), (30, 17), (9, 1)])
def test_kernels_and_parts_have_the_bits_of_plain_torch(
    kind: tuple[torch.dtype, torch.dtype, bool, int | None], rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C, in plain torch by pieces of any size, and on one, two or four processes, each with its rows."""
    whole = made_part(kind, rows, width)
    start = rows_alone(whole, slice(0, rows))
    compact_adamw.update_plainly(whole, PLAIN)
    assert not torch.equal(whole.weight, start.weight)
    ways: list[Callable[[MomentPart, Step], None]] = [compact_adamw.update_plainly]
    if native_problem() is None:
        ways.append(compact_adamw._update_native)
    monkeypatch.setitem(moments.CHUNK, "cpu", 256)
    for way in ways:
        for processes in (1, 2, 4):
            step = -(-rows // processes)
            parts = [rows_alone(start, slice(at, min(at + step, rows))) for at in range(0, rows, step)]
            for part in parts:
                way(part, PLAIN)
            for found, expected in zip(zip(*map(tensors, parts), strict=True), tensors(whole), strict=True):
                assert torch.equal(torch.cat(found), expected)


def test_no_kernel_touches_anything_where_a_step_is_bad() -> None:
    for kind in KINDS:
        part = made_part(kind, 5, 300)
        before = rows_alone(part, slice(0, 5))
        for way in (compact_adamw.update_plainly, compact_adamw.update):
            way(part, replace(PLAIN, bad=torch.tensor(1.0)))
            assert all(torch.equal(a, b) for a, b in zip(tensors(part), tensors(before), strict=True))


INTERPRETED = """
import json, sys, torch
from dataclasses import fields, is_dataclass, replace
from tests.train.compact_parts import KINDS, PLAIN, made_part, rows_alone, tensors
from tuner.train.compact_adamw import update_plainly
from tuner.train.triton_adamw import launch
device, differ = torch.device(sys.argv[1]), []
def there(value):
    if is_dataclass(value):
        return replace(value, **{f.name: there(getattr(value, f.name)) for f in fields(value)})
    return value.to(device) if isinstance(value, torch.Tensor) else value
own = there(PLAIN)
for kind in KINDS:
    whole = made_part(kind, 3, 300)
    part, left = (there(rows_alone(whole, slice(0, 3))) for _ in range(2))
    launch(left, replace(own, bad=torch.ones((), device=device)))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(left), tensors(whole)))
    update_plainly(whole, PLAIN)
    launch(part, own)
    differ.append([str(kind), [int((a.cpu() != b).sum()) for a, b in zip(tensors(part), tensors(whole))]])
print(json.dumps(differ))
"""


def test_the_kernel_of_triton_has_the_bits_of_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = printed(INTERPRETED, "cpu", TRITON_INTERPRET="1")
    assert len(found) == len(KINDS)
    assert not [case for case in found if any(case[-1])]


@pytest.mark.gpu
def test_the_kernel_of_triton_has_the_bits_of_plain_torch_on_a_gpu() -> None:
    assert not [case for case in printed(INTERPRETED, "cuda", fork=False) if any(case[-1])]


FULL = {
    "adapter__kind": "none", "adapter__r": "null", "adapter__dropout": "null", "model__init": "random",
    "model__config": "{hidden_size: 64, intermediate_size: 96}",
}


def test_stopped_and_resumed_is_the_unbroken_run(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    flags = {**FULL, "optimizer__state": "8bit", "optimizer__rounding": "stochastic", "model__dtype": "bf16"}
    flags |= {"train__precision": "bf16", "train__duration": "5 steps"}
    whole = launch(tmp_path, name="whole", **flags)
    launch(tmp_path, train__stop_after="3 steps", **flags)
    again = launch(tmp_path, LaunchOptions(resume="auto"), **flags)
    assert (again.status, again.step) == ("finished", whole.step)
    assert trainings.outcome(again.run_dir) == trainings.outcome(whole.run_dir)


def test_a_resume_with_other_moments_is_refused_with_what_to_write(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    launch(tmp_path, train__stop_after="2 steps", **FULL)
    with pytest.raises(RecipeError, match=r"optimizer.state fp32 -> 8bit") as caught:
        launch(tmp_path, LaunchOptions(resume="auto"), optimizer__state="8bit", **FULL)
    assert "--reset optimizer" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("sections", "said"), tables.cases(__file__, "what_does_not_go_together_is_refused_when_the_recipe_is_read")
)
def test_what_does_not_go_together_is_refused_when_the_recipe_is_read(sections: dict[str, Any], said: str) -> None:
    tree = {"model": {"name_or_path": "x"}, "data": {"train": "x"}}
    with pytest.raises(RecipeError, match=said):
        load_recipe({**tree, **{name: {**tree.get(name, {}), **values} for name, values in sections.items()}})


KEY = torch.tensor(0x1234567890ABCDEF)


def by_chance(numbers: torch.Tensor, key: torch.Tensor = KEY) -> torch.Tensor:
    rows, width = numbers.shape
    return rounded(numbers, noise(key, range(rows), range(width), width))


@pytest.mark.parametrize("number", [1.001, -1.001, 3.3e-5, -7.7e30, 1e-40])
def test_the_mean_is_the_number(number: float) -> None:
    """Over 2^18 roundings the mean is within five standard deviations of it, which are known: it is up or down."""
    numbers = torch.full((512, 512), number)
    found = by_chance(numbers).double()
    low, high = found.min().item(), found.max().item()
    exact = numbers[0, 0].double().item()
    share = (exact - low) / (high - low)
    assert low < exact < high
    assert set(found.flatten().tolist()) == {low, high}
    mean = (found.mean().item() - low) / (high - low)
    assert abs(mean - share) < 5 * math.sqrt(share * (1 - share) / numbers.numel())


def test_what_bfloat16_has_is_never_moved() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    plain = every[~every.isnan()].view(1, -1)
    for step in range(20):
        found = by_chance(plain, KEY + step)
        assert torch.equal(found.view(torch.int16), plain.bfloat16().view(torch.int16))


def test_finite_numbers_stay_finite_and_others_what_they_are() -> None:
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([[largest, -largest, math.inf, -math.inf, math.nan]]).repeat(200, 1)
    found = by_chance(numbers)
    top = torch.finfo(torch.bfloat16).max
    assert found[:, :2].tolist() == [[top, -top]] * 200
    assert found[:, 2:4].tolist() == [[math.inf, -math.inf]] * 200
    assert bool(found[:, 4].isnan().all())
    signalling = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32).view(1, 2)
    assert bool(by_chance(signalling).isnan().all())


def test_parts_have_the_bits_of_the_whole() -> None:
    for width in (1, 7, 300):
        whole = noise(KEY, range(10), range(width), width)
        assert whole.min() >= 0 and whole.max() < 2**16
        for rows in (range(3), range(3, 10)):
            assert torch.equal(noise(KEY, rows, range(width), width), whole[rows.start : rows.stop])
        part = range(width // 8 * 4, width)
        assert torch.equal(noise(KEY, range(10), part, width), whole[:, part.start :])


def test_bits_are_evenly_spread_and_keys_have_their_own() -> None:
    found = noise(KEY, range(1000), range(1000), 1000)
    counts = torch.bincount(found.flatten(), minlength=2**16).double()
    expected = found.numel() / 2**16
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - 2**16) < 6 * math.sqrt(2 * 2**16)
    keys = step_keys(torch.tensor(name_keys(7, ["a", "b"])), torch.tensor(3.0))
    others = step_keys(torch.tensor(name_keys(8, ["a", "b"])), torch.tensor(3.0))
    later = step_keys(torch.tensor(name_keys(7, ["a", "b"])), torch.tensor(4.0))
    drawn = [noise(key, range(100), range(100), 100).double().flatten() for key in (*keys, *others, *later)]
    related = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert related.abs().max() < 0.06
    neighbours = found.double()
    for a, b in ((neighbours[:, 1:], neighbours[:, :-1]), (neighbours[1:], neighbours[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.006


def test_the_hash_is_splitmix64() -> None:
    """The first numbers of the published generator from a state of 1234567."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + number * golden) % 2**64 for number in (1, 2, 3)]
    states = [state - 2**64 if state >= 2**63 else state for state in states]
    assert [number % 2**64 for number in mixed(torch.tensor(states)).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]
