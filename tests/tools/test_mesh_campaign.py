"""The campaign of methods and meshes: its verdicts and its table."""

from dataclasses import replace
from typing import get_args

import pytest

from tools.mesh_campaign import ADAPTERS, LAYOUTS, METHODS, NEAR, Found, cells, verdict
from tuner.config.methods import Method
from tuner.errors import ExitCode

ALONE = Found([(2.0, 1.0), (1.5, 0.5)], [1.25])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ALONE, "equal"),
        (replace(ALONE, steps=[(2.0, 1.0), (1.5 * (1 + NEAR / 2), 9.0)]), "equal"),
        (replace(ALONE, steps=[(2.0, 1.0), (1.5 * (1 + NEAR * 2), 0.5)]), "unequal"),
        (replace(ALONE, evaluations=[1.2501]), "unequal"),
        (replace(ALONE, steps=ALONE.steps[:1]), "unequal"),
        (Found(), "unequal"),
        (Found(code=ExitCode.USAGE, said="method.kind: distill with parallel.tensor"), "refused"),
        (Found(code=ExitCode.ENVIRONMENT, said="parallel.shard: hybrid needs"), "refused"),
        (Found(code=ExitCode.ENVIRONMENT, said="rank 0 lost another process of the run"), "failed"),
        (Found(code=ExitCode.VERIFICATION, said="its reference differs"), "failed"),
        (Found(code=-1, said="no answer in time"), "failed"),
    ],
)
def test_verdicts(found: Found, expected: str) -> None:
    assert verdict(found, ALONE)[0] == expected


def test_every_method_adapter_and_axis_has_cells() -> None:
    found = list(cells())
    assert len(found) == len(set(found)) >= 60
    kinds = {kind.model_fields["kind"].default for kind in get_args(get_args(Method)[0])} - {"custom"}
    assert {cell.method for cell in found} == set(METHODS) == kinds
    assert {cell.adapter for cell in found} == set(ADAPTERS) and {cell.layout for cell in found} == set(LAYOUTS)
