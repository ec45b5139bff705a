"""Versions, facts and the peak rate of the device, what is recorded of a launch's surroundings and what never is, what
is counted of the host's memory, and what the runtime imports.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.tables import cases
from tuner.errors import MachineError
from tuner.runtime import device, host
from tuner.runtime.device import device_facts, measured_peak, side_of
from tuner.runtime.environment import MOST_CHARACTERS, command_line, environment, safe_variables, versions


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


def test_who_observes_sees_what_is_kept_on_the_host() -> None:
    seen: list[tuple[int, str]] = []
    with host.observed(lambda tensor, part: seen.append((tensor.nbytes, part))):
        kept = host.host_empty((2, 3), torch.bfloat16, "optimizer", torch.device("cpu"))
        host.entered(torch.empty(5), "activations")
    host.entered(torch.empty(7), "activations")
    assert kept.shape == (2, 3) and kept.dtype is torch.bfloat16 and not kept.is_pinned()
    assert seen == [(12, "optimizer"), (20, "activations")]


def test_the_peak_is_measured_once_and_draws_no_number_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [side_of("cpu", threads) for threads in (1, 4, 5, 64)] == [1024, 1024, 2048, 4096]
    monkeypatch.setattr(device, "side_of", lambda kind, threads: 64)
    measured_peak.cache_clear()
    before = torch.get_rng_state()
    peaks = [measured_peak("cpu", "fp32", 0) for _ in range(2)]
    assert peaks[0] == peaks[1] > 0
    assert torch.equal(torch.get_rng_state(), before)
    measured_peak.cache_clear()


@pytest.mark.parametrize(("flags", "bound", "fast"), cases(__file__, "bf16_is_fast"))
def test_bf16_is_fast_where_the_processor_has_it_and_onednn_may_use_it(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], bound: dict[str, str], fast: bool
) -> None:
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in bound.items():
        monkeypatch.setenv(name, value)
    assert device.device_facts("cpu").bf16_fast is fast


@pytest.mark.parametrize(("flags", "precision", "side"), cases(__file__, "the_product_is_small"))
def test_the_product_is_small_where_the_processor_lacks_the_type(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], precision: str, side: int | None
) -> None:
    """Without a side here it is that of slow products: one of 1024 would take such a processor seconds."""
    seen: list[int] = []
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.append(len(left)))
    measured_peak.cache_clear()
    measured_peak("cpu", precision, 0)
    measured_peak.cache_clear()
    assert set(seen) == {side or device.SLOW_SIDE}
