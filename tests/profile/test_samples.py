"""Memory of sample answers, without decoding them: the first and the last of a decoding's forwards are its fullest.

The memory that adapters by peft's own configs take is predicted as it is counted.
"""

from pathlib import Path

import pytest
import torch

from tests.fixtures.peft_kinds import KINDS
from tests.fixtures.predict_cases import Case
from tests.fixtures.predict_counted import ProfilerMarks, counted, resolved_case
from tests.fixtures.predict_traced import predicted
from tests.model.tiny import tiny_config
from tuner.model.build import meta_model
from tuner.model.decode import fullest_forwards, greedy
from tuner.model.root import CausalLM

CPU = torch.device("cpu")


@pytest.mark.parametrize(("prompts", "limits"), [((40, 25, 3), (30, 12, 30)), ((9,), (50,)), ((60, 7), (1, 2))])
def test_the_peak_is_that_of_the_whole_decoding(prompts: tuple[int, ...], limits: tuple[int, ...]) -> None:
    on_meta = meta_model(tiny_config("llama"), torch.float32)
    root = CausalLM(on_meta.to_empty(device="cpu")).eval()
    for tensor in (*root.parameters(), *root.buffers()):
        torch.nn.init.zeros_(tensor)
    given = [[1] * length for length in prompts]
    whole = peak(lambda: greedy(root, given, (), limits, CPU))
    assert peak(lambda: fullest_forwards(root, given, limits, CPU)) == pytest.approx(whole, rel=0.02)


def peak(work: object) -> int:
    """Bytes at the fullest moment of it, above those before."""
    assert callable(work)
    marks = ProfilerMarks()
    with torch.no_grad(), marks:
        marks("work")
        work()
    return max(most for _, _, most in marks.found())


@pytest.mark.slow("vera", "loha")
@pytest.mark.parametrize("name", ["vera", "loha", "boft"])
def test_prediction_is_what_was_counted(name: str, tmp_path: Path) -> None:
    case = Case("llama", {"adapter.kind": "peft", "adapter.config": KINDS[name]})
    setup = resolved_case(case, tmp_path)
    real, said = counted(*setup), predicted(*setup)
    assert said.marks[:-1] == real.marks[:-1]
    assert said.peak == pytest.approx(real.peak, rel=1e-3)
