"""The campaign about intervals of ladder fits in small: one case, and the verdicts."""

import functools
import sys

import pytest

from tools import fit_campaign


@pytest.mark.slow
def test_a_case_in_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fit_campaign, "CASES", fit_campaign.CASES[:1])
    monkeypatch.setattr(fit_campaign, "trial", functools.cache(fit_campaign.trial))
    monkeypatch.setattr(fit_campaign, "MOST", 1.0)
    monkeypatch.setattr(sys, "argv", ["fit_campaign.py", "--trials", "2", "--samples", "60"])
    for least, code in ((0.5, 0), (1.1, 1)):
        monkeypatch.setattr(fit_campaign, "LEAST", least)
        assert fit_campaign.main() == code
        heading, line = capsys.readouterr().out.splitlines()
        assert heading.split() == ["case", "run", "held", "E", "a", "b", "identified", "error", "width"]
        assert line.startswith("6 rungs, 4 marks") and line.endswith("%")
