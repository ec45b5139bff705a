"""What is recorded of a launch's surroundings, and what never is."""

import json
import os
import sys
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.runtime.environment import MOST_CHARACTERS, command_line, environment, safe_variables


def test_only_listed_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: Any = cases(__file__, "variables")
    found = safe_variables(variables | {"TUNER_LONG": "x" * 5000})
    assert sorted(found) == cases(__file__, "recorded")
    assert found["TUNER_PROXY"] == "http://***@host/x"
    assert len(found["TUNER_LONG"]) == MOST_CHARACTERS + 1
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    facts = environment()
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert facts["python"] == sys.version.split()[0]
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert "very-secret-1" not in json.dumps(facts)


@pytest.mark.parametrize(("words", "shown"), cases(__file__, "the_command_line_without_secrets"))
def test_the_command_line_without_secrets(words: list[str], shown: list[str]) -> None:
    assert command_line(words) == shown
