"""Versions, device facts, and what the runtime imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.errors import MachineError
from tuner.runtime.device import device_facts
from tuner.runtime.environment import versions


def test_versions_name_what_is_installed() -> None:
    found = versions()
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "safetensors"} <= found.keys()


CPUINFO = "processor : 0\nmodel name\t: A Processor 3000\nflags\t\t: fpu sse2{more}\n"


@pytest.mark.parametrize(("more", "has_bf16"), [("", False), (" avx512_bf16 avx512f", True)])
def test_the_processor_is_what_the_system_says(more: str, has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = Path.read_text

    def said(path: Path, **options: str) -> str:
        return CPUINFO.format(more=more) if str(path) == "/proc/cpuinfo" else real(path, **options)

    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)  # by which a user keeps oneDNN from what there is
    monkeypatch.setattr(Path, "read_text", said)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    facts = device_facts("cpu")
    assert (facts.kind, facts.name, facts.threads) == ("cpu", "A Processor 3000", 5)
    assert facts.bf16_fast is has_bf16
    whole = int(re.search(r"MemTotal:\s+(\d+)", real(Path("/proc/meminfo")))[1]) * 1024  # type: ignore[index]
    assert 0 < facts.free_bytes <= facts.total_bytes <= whole


def test_a_missing_cuda_device_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_facts("auto").kind == "cpu"
    with pytest.raises(MachineError, match="no CUDA device"):
        device_facts("cuda")


def test_the_runtime_imports_no_torch(root: Path) -> None:
    names = ("files", "lock", "dist", "memory", "stop", "console", "environment", "git")
    code = f"import sys\nfor n in {names}: __import__('tuner.runtime.' + n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
