"""Stochastic rounding: without bias, exact where bfloat16 is, and the same for every part of a parameter."""

import math

import pytest
import torch

from tuner.train.adamw_update import mixed, name_keys, noise, rounded, step_keys

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
