"""Every wrong export of the campaign, of a small and of a large update of a tiny model, is held back."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.export.runs import write_base, write_run
from tools.export_campaign import RUNS, planted
from tools.export_faults import FAULTS, Fault, hold_back
from tuner.model.adapter import LoraSpec

SMALL, LARGE = 2e-4, 0.05
LORA, DORA = (LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=use_dora) for use_dora in (False, True))
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, float], Path]:
    """Runs of a tied model in bf16, by whether they are DoRA's and by how far they went."""
    place = tmp_path_factory.mktemp("runs")
    base = write_base(place / "base", "llama-tied")
    return {
        (lora.use_dora, amount): write_run(place / f"{lora.use_dora}-{amount}", base, lora, True, "bf16", (), amount)
        for lora in (LORA, DORA)
        for amount in (SMALL, LARGE)
    }


@pytest.mark.parametrize("amount", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_export_is_held_back(
    runs: dict[tuple[bool, float], Path], tmp_path: Path, fault: Fault, amount: float
) -> None:
    assert hold_back(runs[fault.of == "dora", amount], fault, tmp_path / "out", dtype="bf16") == ""


def test_an_export_without_a_fault_is_not(runs: dict[tuple[bool, float], Path], tmp_path: Path) -> None:
    assert hold_back(runs[False, SMALL], Fault("none", nullcontext), tmp_path / "out").startswith("published")


def test_the_campaign_has_what_it_says() -> None:
    assert len(RUNS) == len(set(RUNS)) == 24
    assert len({fault.name for fault in FAULTS}) >= 12 and len(list(planted())) == 2 * len(FAULTS)
