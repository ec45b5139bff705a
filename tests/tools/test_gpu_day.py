"""The day on a GPU in tiny shapes on a CPU: faults are seen, and lines become one table."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tools.gpu_day import __main__ as day_command
from tools.gpu_day import attention, layers, pack, rates, runs
from tools.gpu_day.parts import PARTS, Part
from tools.gpu_day.record import Day
from tools.gpu_day.report import read, table
from tuner.profile import devices as profile_rates

pytestmark = pytest.mark.filterwarnings("ignore")  # a tool's own, whoever's they are
SMALL_PARTS = ["machine", "rates", "steps", "traces", "attention", "layers", "arithmetic"]
SMALL_PARTS += ["attention-cost", "first", "starts"]
HERE = ["--device", "cpu", "--small"]


@pytest.fixture
def day(tmp_path: Path) -> Day:
    return Day("test", "cpu", True, tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_predicted_stands_beside_measured(day: Day) -> None:
    found = runs.profiled(day, runs.write_recipe(day, "0.6B"), "one", "--train.micro_batch_size", "1")
    assert found["exit code"] == 0 and found["tokens/s"] > 0
    assert found["predicted by measured"] == pytest.approx(1, abs=0.05)


def test_what_was_measured_goes_into_the_table_of_predictions(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text('[{"device": "NVIDIA A10"}, {"device": "NVIDIA H200"}]')
    machine = {"part": "machine", "what": "machine", "device": "NVIDIA H200", "date": "2027-01-01", "torch": "2.13"}
    lines: list[dict[str, Any]] = [{**machine, "cuda": "13", "transformers": "5.23"}]
    with pytest.raises(ValueError, match="there are no rates"):
        rates.record(lines, path)
    for sides in (*rates.PRODUCTS, *rates.THIN):
        lines.append({"part": "rates", "what": rates._named(*sides), "op/s": 6e14, "bytes/s": 1.5e12})
    lines.append({"part": "rates", "what": "copy", "bytes/s": 4e12})
    for name in rates.ATTENTION:
        by = {"flash attention 2": 2e14, "flash attention 4": 4e14}
        lines.append({"part": "rates", "what": f"attention, {name}", **by})
    first, *others = profile_rates.steps_of("NVIDIA H200")
    lines.append({"part": "steps", "what": str(first), "measured s": 0.9, "measured GiB": 22.0})
    assert rates.record(lines, path).startswith(f"NVIDIA H200: {len(rates.PRODUCTS)} products, 3 of ")
    other, found = json.loads(path.read_text())
    assert other == {"device": "NVIDIA A10"}
    assert found["versions"] == {"torch": "2.13", "cuda": "13", "transformers": "5.23"}
    assert found["rates"]["attention"] == [[512, 2e14], [4096, 2e14]] and found["rates"]["thin"] == 1.5e12
    assert found["steps"][0] == {**vars(first), "measured_s": 0.9, "measured_gib": 22.0}
    assert found["steps"][1:] == [vars(step) for step in others], "what was predicted before stays"


def test_a_command_that_fails_is_told(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str, program: str | None = None) -> Any:
        return runs.subprocess.CompletedProcess(words, 5, "", "error: out of memory")

    monkeypatch.setattr(runs, "tuner", refused)
    assert runs.trained(day, Path("r.yaml"), "x") == {"ok": False, "exit code": 5, "said": "error: out of memory"}


def test_wrong_attention_and_wrong_gradients_are_seen(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    right, case = attention.attend, attention.Case(4, 2, 16, 16, {"sliding_window": 8})
    assert attention.judged(day, [(case, (20, 1, 12))])["ok"]
    wider = case._replace(options={"sliding_window": 9})
    monkeypatch.setattr(attention, "attend", lambda case, *given: right(wider, *given))
    assert not attention.judged(day, [(case, (20, 1, 12))])["ok"]

    def scaled(day: Day, way: layers.Way) -> Any:
        root = real(day, way)
        if way.level == "full":
            hooked = root.model.model.layers[0].mlp.down_proj.weight
            hooked.register_hook(lambda gradient: gradient * 2)
        return root

    real = layers.built
    monkeypatch.setattr(layers, "built", scaled)
    found = layers.compared(day, [layers.Way(level="full"), layers.Way(level="selective")])
    assert not found["ok"] and list(found["wrong"]) == ["llama full"]


def test_a_failed_check_does_not_stop_the_next_one(day: Day) -> None:
    def short() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    day.check("divides", lambda: {"ratio": 1 / 0})
    day.figure("fills", short)
    day.figure("breaks", lambda: {"ratio": 1 / 0})
    day.check("goes on", lambda: {"value": 3})
    lines = read([day.out])
    assert [(line["what"], line["ok"]) for line in lines] == [
        ("divides", False), ("fills", None), ("breaks", False), ("goes on", True),
    ]  # fmt: skip
    assert lines[0]["error"] == "ZeroDivisionError: division by zero" and "1 / 0" in lines[0]["at"]
    assert lines[1]["out of memory"] == "CUDA out of memory"


def test_parts_that_hang_or_fail_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(name, "parts.machine", limit, name) for name, limit in (("a", 60), ("b", 60), ("c", 1)))
    monkeypatch.setattr(day_command, "PARTS", parts)
    programs = {"a": "pass", "b": "import sys; sys.exit(3)", "c": "import time; time.sleep(60)"}

    class Started(day_command.subprocess.Popen):  # type: ignore[misc, name-defined]
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-S", "-c", programs[words[words.index("part") + 1]]], **options)

    monkeypatch.setattr(day_command.subprocess, "Popen", Started)
    assert day_command.main(["run", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *HERE]) == 1
    assert {line["part"]: line["ended"] for line in read([tmp_path / "out"])} == {
        "b": "exit code 3", "c": "at its limit of 1 s",
    }  # fmt: skip
    assert "0 of 2 checks passed." in (tmp_path / "out" / "table.md").read_text()
    words = ["run", str(tmp_path / "late"), "--work", str(tmp_path / "work"), "--seconds", "5", *HERE]
    assert day_command.main(words) == 0
    assert {line["skipped"] for line in read([tmp_path / "late"])} == {"no time is left"}


def test_lines_of_several_calls_are_one_table(tmp_path: Path) -> None:
    head = {"part": "machine", "what": "machine", "ok": None, "device": "H200", "torch": "2.11"}
    first = {"part": "a", "what": "x | y", "ok": True, "error of": 1.5e-3, "wrong": [], "seconds": 3.2}
    second = {"part": "b", "what": "z", "ok": False, "tokens/s": 12345, "level": "full"}
    for name, lines in (("one", [head, first]), ("two", [head, second])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert table(read([tmp_path / "one", tmp_path / "two"])).splitlines() == [
        "device H200 · torch 2.11", "", "| part | what | found | |", "|---|---|---|---|",
        "| a | x \\| y | error of 0.0015 | ok |", "| b | z | tokens/s 12,345 · level full | **failed** |",
        "", "1 of 2 checks passed.",
    ]  # fmt: skip


def test_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All that the roots need and the machine lacks, once; torch and CUDA never."""
    needs = {"trl": ["accelerate>=1.4", "torch>=2", "rich; extra == 'x'"], "cyclopts": ["attrs>=23", "rich>=99"]}

    def download(wheels: Path, wanted: str, python: str) -> Path:
        name = Requirement(wanted).name
        asked.append(wanted)
        path = wheels / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            lines = "".join(f"Requires-Dist: {line}\n" for line in needs.get(name, []))
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\n{lines}")
        return path

    asked: list[str] = []
    monkeypatch.setattr(pack, "download", download)
    there = tmp_path / "there.txt"
    there.write_text("torch==2.11.0+cu130\nrich==14.0\nattrs\nnumpy==2.5.2\nhuggingface_hub==2.0.0\n")
    assert pack.pack(tmp_path / "wheels", there, "3.12") == 0
    names = [Requirement(wanted).name for wanted in asked]
    assert {"trl", "cyclopts", "datasets", "accelerate", "transformers", "huggingface-hub", "rich"} <= set(names)
    assert not {"torch", "attrs", "numpy", "triton"} & set(names) and len(names) == len(set(names))
    assert any(wanted.startswith("transformers==5.") for wanted in asked)
    assert f"{len(names)} wheels" in capsys.readouterr().out


def test_parts_are_named_once_and_described() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(callable(part.load()) and part.covers and part.limit_s <= 600 for part in PARTS)
