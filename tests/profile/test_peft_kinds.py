"""The memory that adapters by peft's own configs take is predicted as it is counted."""

from pathlib import Path

import pytest

from tests.fixtures.peft_kinds import KINDS
from tests.fixtures.predict_cases import Case
from tests.fixtures.predict_counted import counted, resolved_case
from tests.fixtures.predict_traced import predicted


@pytest.mark.slow("vera", "loha")
@pytest.mark.parametrize("name", ["vera", "loha", "boft"])
def test_prediction_is_what_was_counted(name: str, tmp_path: Path) -> None:
    case = Case("llama", {"adapter.kind": "peft", "adapter.config": KINDS[name]})
    setup = resolved_case(case, tmp_path)
    real, said = counted(*setup), predicted(*setup)
    assert said.marks[:-1] == real.marks[:-1]
    assert said.peak == pytest.approx(real.peak, rel=1e-3)
