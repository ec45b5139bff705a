"""`tuner prove`: layouts that are right are equal, and planted faults are named."""

import pytest

from tools.prove_campaign import FAULTS, found_with, problem, recipe_of, setting_of
from tuner.prove.compare import EXACT, LIMITS, LayoutProof
from tuner.prove.layouts import parse
from tuner.prove.prove import proofs_of
from tuner.prove.training import Setting

pytestmark = pytest.mark.multi
STEPS = 3
FAST = ("norm counted twice",)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    place = tmp_path_factory.mktemp("prove")
    return setting_of(recipe_of("llama", place / "configs", accumulate=2), place / "setting", STEPS)


@pytest.mark.slow
def test_a_layout_that_is_right_is_equal(setting: Setting) -> None:
    ((_, proof),) = proofs_of(setting, [parse("fsdp2")])
    assert (proof.verdict, proof.cause) == ("equal", None)
    assert proof.figures.keys() == LIMITS.keys() | set(EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_planted_fault_is_named(name: str, setting: Setting) -> None:
    proof = found_with(FAULTS[name], setting)
    assert problem(FAULTS[name], proof) is None, proof


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if name not in FAST and fault.model == "llama"]
)
def test_the_others_are_named(name: str, setting: Setting) -> None:
    proof = found_with(FAULTS[name], setting)
    assert problem(FAULTS[name], proof) is None, proof


def test_what_passes_or_is_named_otherwise_is_a_problem() -> None:
    fault = FAULTS["norm counted twice"]
    assert "the verdict is equal" in str(problem(fault, LayoutProof("fsdp2", 2, "equal")))
    assert "named otherwise" in str(problem(fault, LayoutProof("fsdp2", 2, "unequal", cause="the loss")))
