"""Versions, device facts, and what the runtime imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuner.errors import MachineError
from tuner.runtime.device import device_facts
from tuner.runtime.versions import versions


def test_versions_name_what_is_installed() -> None:
    found = versions()
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "safetensors"} <= found.keys()


def test_the_processor() -> None:
    facts = device_facts("cpu")
    assert facts.kind == "cpu"
    assert facts.name
    assert 0 <= facts.free_bytes <= facts.total_bytes
    assert facts.threads >= 1


def test_a_missing_cuda_device_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_facts("auto").kind == "cpu"
    with pytest.raises(MachineError, match="no CUDA device"):
        device_facts("cuda")


def test_the_runtime_imports_no_torch(root: Path) -> None:
    names = ("files", "lock", "dist", "collective", "process", "device", "stop", "console", "versions", "git")
    names += ("environment",)
    code = f"import sys\nfor n in {names}: __import__('tuner.runtime.' + n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
