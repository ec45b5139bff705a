"""How torch's allocator keeps the memory of CUDA devices, where the user says nothing of it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tuner.runtime import before_torch
from tuner.runtime.before_torch import expand_segments
from tuner.runtime.environment import safe_variables

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "version"
    path.touch()
    monkeypatch.setattr(before_torch, "_DRIVER", (path,))
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-45-generic")
    return path


@pytest.mark.usefixtures("driver")
def test_blocks_grow_and_the_run_s_record_says_so() -> None:
    environment: dict[str, str] = {}
    expand_segments(environment)
    assert environment == EXPANDABLE == safe_variables(environment)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    expand_segments(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_not_without_a_device_on_wsl_or_once_cuda_has_begun(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        expand_segments(environment)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
        expand_segments(environment)
    assert environment == {}
    expand_segments(environment)
    assert environment == EXPANDABLE
    driver.unlink()
    without: dict[str, str] = {}
    expand_segments(without)
    assert without == {}
