"""The verdicts of the campaign about `tuner prove`."""

from tools.prove_campaign import FAULTS, problem
from tuner.prove.compare import LayoutProof


def test_faults_are_planted_in_what_is_there() -> None:
    assert [name for name, fault in FAULTS.items() if not hasattr(fault.owner, fault.name)] == []


def test_what_passes_or_is_named_otherwise_is_a_problem() -> None:
    fault = FAULTS["norm counted twice"]
    assert "the verdict is equal" in str(problem(fault, LayoutProof("fsdp2", 2, "equal")))
    assert "named otherwise" in str(problem(fault, LayoutProof("fsdp2", 2, "unequal", cause="the loss")))
