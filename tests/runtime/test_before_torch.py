"""How threads wait for each other, and how torch keeps the memory of CUDA devices, where the user says nothing."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tuner.runtime import before_torch
from tuner.runtime.before_torch import SPIN_COUNT, expand_segments, limit_spinning, prepare_environment
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


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_the_user_lets_threads_wait_stays(name: str) -> None:
    environment = {name: "ACTIVE"}
    limit_spinning(environment)
    assert environment == {name: "ACTIVE"}


@pytest.mark.usefixtures("driver")
def test_threads_and_memory_are_prepared_together_and_recorded() -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment)
    assert environment == EXPANDABLE | {"GOMP_SPINCOUNT": SPIN_COUNT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert EXPANDABLE.items() <= safe_variables(environment).items(), "the run's record says so"
    louder = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    prepare_environment(louder)
    assert louder["TORCH_CPP_LOG_LEVEL"] == "INFO"


ENTRIES = (
    "from tuner.cli.main import main; main(['--version'])",
    "import tuner; tuner.train({'model': {'name_or_path': 'a/b'}, 'data': {'train': 'x'}})",
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_set_before_torch_is_loaded(entry: str, root: Path) -> None:
    program = f"""
import os, sys
class Torch:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise SystemExit
sys.meta_path.insert(0, Torch)
try:
    {entry}
except SystemExit:
    pass
print(os.environ["GOMP_SPINCOUNT"])
"""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = unset | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines()[-1:] == [SPIN_COUNT], done.stderr
