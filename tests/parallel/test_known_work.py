"""Work whose result is known: wrong products and wrong collectives are named."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fixtures.processes import run_ranks
from tuner.parallel.health import KnownProducts, wrong_collective
from tuner.runtime.process import Collective, gloo_group

CPU = torch.device("cpu")
AUTOCASTS: dict[str, Any] = {
    "fp32": nullcontext,
    "bf16": partial(torch.autocast, "cpu", torch.bfloat16),
    "fp16": partial(torch.autocast, "cpu", torch.float16),
}


@pytest.mark.parametrize("precision", AUTOCASTS)
def test_products_of_integers_are_exact_in_every_type(precision: str) -> None:
    assert KnownProducts(CPU, AUTOCASTS[precision]).problem() is None


def test_what_a_device_computes_wrongly_is_named() -> None:
    products = KnownProducts(CPU, nullcontext)
    products._whole[0][3] += 1  # as a device would that multiplies by something else
    row = int(products._whole[1].sum(0).nonzero()[0])
    assert str(products.problem()).startswith("a product of matrices is wrong: ")
    assert str(products.problem()).endswith(f"at [3, {row}]")
    products = KnownProducts(CPU, nullcontext)
    products._drawn[0][0, 0] += 1e-6
    assert products.problem() == "a product of matrices is not what it was when the launch began"


@pytest.mark.multi
@pytest.mark.parametrize("fault", ["none", "all_reduce", "gather", "reduce_scatter"])
def test_collectives_that_carry_something_else_are_named(fault: str, tmp_path: Path) -> None:
    expected = {
        "none": None,
        "all_reduce": "an all-reduce of known numbers gave others",
        "gather": "an all-gather brought other numbers than rank 1 sent",
        "reduce_scatter": "a reduce-scatter of known numbers gave others",
    }

    def work(rank: int) -> None:
        from tuner.parallel import health

        ranks = Collective(gloo_group())
        if rank == 0 and fault == "all_reduce":
            real = dist.all_reduce

            def wrong_sum(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                done = real(tensor, *args, **kwargs)
                tensor[5] += 1
                return done

            dist.all_reduce = wrong_sum
        elif rank == 0 and fault != "none":
            name = "gather_parts" if fault == "gather" else "reduce_scatter_parts"
            real_parts = getattr(health, name)

            def wrong_parts(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
                real_parts(whole, own, group)
                whole[-1, 7] += 1

            setattr(health, name, wrong_parts)
        assert wrong_collective(CPU, ranks) == (expected[fault] if rank == 0 else None)

    assert run_ranks(2, tmp_path, work) == [0, 0]
