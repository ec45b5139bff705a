"""What is recorded of a launch's surroundings, and what never is."""

import json
import os
import sys

import pytest

from tests.fixtures.tables import cases
from tuner.runtime.environment import MOST_CHARACTERS, command_line, environment, safe_variables


def test_only_listed_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "TUNER_CACHE": "/cache",
        "TOKENIZERS_PARALLELISM": "false", "TUNER_PROXY": "http://me:pw@host/x", "TUNER_LONG": "x" * 5000,
        "TUNER_API_KEY": "s1", "TUNER_TOKEN": "s2", "HF_TOKEN": "s3", "WANDB_API_KEY": "s4", "AWS_SECRET": "s5",
        "PATH": "/bin", "HOME": "/root", "OMP_PASS": "s6", "OMP_PASSWORD_FILE": "s7", "TUNER_DB_PWD": "s8",
        "NCCL_TOKEN_2": "s9", "TUNER_WEBHOOK_URL": "s10", "TUNER_KEY1": "s11", "GLOO_SESSION_COOKIE": "s12",
        "TUNER_CREDS": "s13", "NCCL_PASSPHRASE": "s14", "OMP_API_KEY_FILE": "s15", "TUNER_PASSES": "3",
    }  # fmt: skip
    found = safe_variables(env)
    assert set(found) == {
        "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TUNER_CACHE", "TOKENIZERS_PARALLELISM",
        "TUNER_PROXY", "TUNER_LONG", "TUNER_PASSES",
    }  # fmt: skip
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
