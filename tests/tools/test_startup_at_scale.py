"""What grows with processes is continued by a parabola that was measured, and a group's sockets are counted."""

import pytest

from tools.startup_at_scale import continued, gloo, mesh, received


def test_only_a_parabola_is_continued() -> None:
    assert continued({4: 744, 8: 1744, 16: 4512, 32: 13120}, 1000) == pytest.approx(8_154_000)
    with pytest.raises(ValueError, match="no parabola"):
        continued({4: 462, 8: 616, 16: 770, 32: 924, 64: 1078, 128: 1232}, 1000)


def test_a_lazy_group_connects_to_those_that_it_exchanges_with() -> None:
    at_once, lazy = gloo(12, False), gloo(12, True)
    assert at_once["sockets"] == at_once["sockets_in_use"] >= 12
    assert lazy["sockets"] < lazy["sockets_in_use"] < 9
    assert lazy["read_bytes"] < at_once["read_bytes"] == 12 * at_once["set_bytes"]


def test_groups_of_a_layout_grow_with_processes() -> None:
    assert [mesh("hybrid", size)["groups"] for size in (16, 64)] == [8 + 2, 8 + 8]


def test_what_rank_0_makes_is_sent_once_to_each() -> None:
    assert received("on_rank0", 100) == {"each": 100, "rank0": 100, "before": 100_000}
    assert received("to_rank0", 100) == {"each": 4, "rank0": 100_000, "before": 100_000}
