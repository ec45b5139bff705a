"""Every method and adapter on every kind of mesh: whole launches, held against the same launch in one process.

    python -m tools.mesh_campaign [--only TEXT ...] [--again] [--timeout SECONDS] [--out DIR]

A cell is a training of a tiny model, its reference and its evaluations included, on two or four processes that meet
over gloo; those on two come first. Each is equal (all losses within 1e-5 of one process, relative), unequal, refused
(the recipe or the machine is, before anything is trained, by name), or failed. Lines go to `OUT/cells.jsonl` as they
come; a campaign that is started again continues after them, and takes failed cells again with `--again`. The table is
`OUT/table.md`. Exits with 1 where a cell is unequal or failed.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.commands import ROOT, asked, free_port, read_lines, write_lines
from tools.tables import beside
from tuner.config.load import load_recipe
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.errors import ExitCode, TunerError
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

STEPS = 3
NEAR = 1e-5
"""How far a loss may be apart, relative."""


@dataclass(frozen=True)
class Layout:
    """A mesh: its processes, the machines that they are said to be on, and the section of the recipe."""

    processes: int
    parallel: Mapping[str, Any]
    machines: int = 1


_TABLE: dict[str, Any] = beside(__file__)
LAYOUTS = {name: Layout(**fields) for name, fields in _TABLE["layouts"].items()}
ADAPTERS: dict[str, dict[str, Any]] = _TABLE["adapters"]
OF_METHODS = ("full x2", "tensor 2", "sequence 2", "hybrid x4", "full x2, tensor 2", "tensor 2, sequence 2")
METHODS: dict[str, tuple[str, dict[str, Any]]] = _TABLE["methods"]
"""Each with its rows and its keys."""


@dataclass(frozen=True)
class Cell:
    """A method with an adapter on a model, and the mesh that it is tried on."""

    method: str
    adapter: str
    model: str
    layout: str

    def __str__(self) -> str:
        return f"{self.method}, {self.adapter}, {self.model}, {self.layout}"


def cells() -> Iterator[Cell]:
    """Every method with LoRA, every adapter with sft, some methods in full and with DoRA, and mixtures."""
    for method in METHODS:
        yield from (Cell(method, "lora", "dense", layout) for layout in OF_METHODS)
    for adapter in ("none", "lora", "rslora", "dora"):
        rest = [name for name in LAYOUTS if "expert" not in name and (adapter != "lora" or name not in OF_METHODS)]
        yield from (Cell("sft", adapter, "dense", layout) for layout in rest)
    for adapter, methods in (("none", ("dpo", "kto", "reward", "distill")), ("dora", ("dpo", "kto", "orpo"))):
        for method in methods:
            yield from (Cell(method, adapter, "dense", layout) for layout in OF_METHODS[:3])
    for layout in ("full x2", "sequence 2", "expert 2", "full x4, expert 2", "tensor 2, expert 2"):
        yield from (Cell("sft", adapter, "mixture", layout) for adapter in ("none", "lora", "experts"))
        yield Cell("dpo", "lora", "mixture", layout)


@dataclass
class Found:
    """What came of a launch: losses and gradient norms of its steps, then its evaluations; or why there are none."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    code: int = 0
    said: str = ""


# ---- a launch ----


def write_inputs(place: Path) -> None:
    """The models and the rows of all cells; what is there stays."""
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (place / "rows").is_dir():
        return
    sizes: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
    }  # fmt: skip
    for seed, name in enumerate(("dense", "teacher")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48)).save_pretrained(place / name)
    load_tokenizer("byte", None, TokenizerSection(name_or_path="byte")).save(place / "teacher")
    torch.manual_seed(2)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = Qwen3MoeConfig(**sizes, intermediate_size=48, **experts, output_router_logits=True)
    Qwen3MoeForCausalLM(mixture).save_pretrained(place / "mixture")
    numbers = range(30)
    answers = [{"prompt": f"{i} ", "completion": "ab" * (i % 7 + 1)} for i in numbers]
    rows: dict[str, list[dict[str, Any]]] = {
        "answers": answers, "texts": [{"text": f"{i} " + "abc" * (i % 9 + 3)} for i in numbers],
        "pairs": [{"prompt": f"{i} ", "chosen": "ab" * (i % 7 + 1), "rejected": "ba" * (i % 5 + 1)} for i in numbers],
        "labelled": [{**row, "label": i % 3 > 0} for i, row in enumerate(answers)],
    }
    written = place / "rows.new"
    written.mkdir(exist_ok=True)
    for name, records in rows.items():
        write_lines(written / f"{name}.jsonl", records)
    written.rename(place / "rows")


def load_inputs(place: Path) -> None:
    """Have the inputs written by a child, whose threads no rank inherits."""
    os.waitpid(forked(lambda: write_inputs(place), place / "inputs.txt", {}), 0)


def recipe_of(cell: Cell, place: Path, parallel: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The recipe of a cell, under a section `parallel`."""
    rows, keys = METHODS[cell.method]
    keys = {key: str(place / value) if key == "teacher" else value for key, value in keys.items()}
    return {
        "name": "cell", "output_dir": str(run), "seed": 3,
        "model": {"name_or_path": str(place / cell.model)}, "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": cell.method, **keys}, "adapter": ADAPTERS[cell.adapter],
        "data": {
            "train": str(place / "rows" / f"{rows}.jsonl"), "eval": "6 documents", "max_length": 48,
            "cache_dir": str(place / "cache"),
        },
        "train": {
            "duration": f"{STEPS} steps", "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32",
            "device": "cpu",
        },
        "optimizer": {"lr": 1e-2}, "parallel": {**parallel, "timeout": "300 s"},
        "checkpoint": {"every": "never", "at_end": False},
        "eval": {"samples": 0, "at_start": True}, "logging": {"level": "error"},
    }  # fmt: skip


def run_rank(recipe: dict[str, Any], rank_info: RankInfo, result: Path) -> None:
    """Train in this process as a rank of a launch; rank 0 writes what came of it."""
    found = Found()
    try:
        run = train(load_recipe(recipe), LaunchOptions(), rank_info, Console(rank_info.is_main, "error")).run_dir
        found.steps = [(line["loss"], line["grad_norm"]) for line in read_lines(run / "metrics.jsonl", "train")]
        found.evaluations = [line["loss"] for line in read_lines(run / "metrics.jsonl", "eval")]
    except TunerError as error:
        found.code, found.said = int(error.exit_code), error.message
    except Exception as error:  # noqa: BLE001 - a cell that fails is one of the results
        traceback.print_exc()
        found.code, found.said = int(ExitCode.BUG), f"{type(error).__name__}: {error}"
    if rank_info.is_main:
        names = sorted(name for name in sys.modules if name.split(".")[0] in ("tuner", "torch", "transformers", "peft"))
        (result.parent / "modules.txt").write_text("\n".join(names), encoding="utf-8")
        result.write_text(json.dumps(asdict(found)), encoding="utf-8")


def load_what(place: Path) -> None:
    """Load in this process what a launch loaded, whose list it left: the ranks that are forked then need not."""
    for name in (place / "modules.txt").read_text(encoding="utf-8").split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def forked(work: Callable[[], None], log: Path, environment: Mapping[str, str]) -> int:
    """A child of this process, which has the libraries loaded, does the work; its output goes to a file."""
    child = os.fork()
    if child:
        return child
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        work()
    except BaseException:  # noqa: BLE001 - it goes to the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def launched(recipe: dict[str, Any], layout: Layout, place: Path, timeout_s: float) -> Found:
    """What came of a launch on a layout's processes, all of which have ended."""
    result, log = place / "result.json", place / "log.txt"
    place.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    size, local = layout.processes, layout.processes // layout.machines
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    children = []
    for rank in range(size):
        rank_info = RankInfo(rank, size, rank % local, local)
        children.append(forked(lambda at=rank_info: run_rank(recipe, at, result), log, environment))  # type: ignore[misc]
    ends = time.monotonic() + timeout_s
    waiting = set(children)
    while waiting and time.monotonic() < ends:
        waiting -= {child for child in waiting if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.05)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if result.is_file():
        return Found(**json.loads(result.read_text(encoding="utf-8")))
    return Found(code=-1, said="no answer in time" if waiting else f"no answer; see {log}")


# ---- the table ----


def apart(found: Found, alone: Found) -> float:
    """The largest relative difference of a loss; infinite where there is another number of them."""
    ours = [loss for loss, _ in found.steps] + found.evaluations
    theirs = [loss for loss, _ in alone.steps] + alone.evaluations
    if len(ours) != len(theirs) or not ours:
        return float("inf")
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def verdict(found: Found, alone: Found) -> tuple[str, float | None]:
    """equal, unequal, refused or failed, and how far losses are apart."""
    if found.code == ExitCode.USAGE or (found.code == ExitCode.ENVIRONMENT and "parallel." in found.said):
        return "refused", None
    if found.code or alone.code:
        return "failed", None
    far = apart(found, alone)
    return "equal" if far <= NEAR else "unequal", far


def tried(cell: Cell, out: Path, alone: dict[str, Found], timeout_s: float) -> dict[str, Any]:
    """A line of the campaign."""
    key = f"{cell.method}, {cell.adapter}, {cell.model}"
    layout, place = LAYOUTS[cell.layout], out / "cells" / str(cell).replace(", ", "-").replace(" ", "_")
    if key not in alone:
        where = out / "cells" / f"alone-{key.replace(', ', '-')}"
        recipe = recipe_of(cell, out, {}, where / f"run-{time.time_ns()}")
        alone[key] = launched(recipe, Layout(1, {}), where, timeout_s)
        if (where / "modules.txt").is_file():
            load_what(where)
    recipe = recipe_of(cell, out, layout.parallel, place / f"run-{time.time_ns()}")
    found = launched(recipe, layout, place, timeout_s)
    says, far = verdict(found, alone[key])
    said = found.said or alone[key].said
    norms = [abs(a[1] - b[1]) / b[1] for a, b in zip(found.steps, alone[key].steps, strict=False)]
    return {
        "cell": str(cell), "verdict": says, "apart": far, "norms": max(norms, default=None), "code": found.code,
        "said": said,
    }  # fmt: skip


def table(lines: Mapping[str, dict[str, Any]]) -> str:
    """Rows of methods and adapters, columns of meshes."""
    names = [name for name in LAYOUTS if any(cell.endswith(f", {name}") for cell in lines)]
    rows: dict[str, dict[str, str]] = {}
    for cell, line in lines.items():
        name = max((one for one in names if cell.endswith(f", {one}")), key=len)
        far = "" if line["apart"] is None else f" {line['apart']:.0e}"
        rows.setdefault(cell.removesuffix(f", {name}"), {})[name] = line["verdict"] + far
    head = f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
    body = "".join(f"| {row} | {' | '.join(of.get(name, '') for name in names)} |\n" for row, of in rows.items())
    why = {line["said"]: cell for cell, line in lines.items() if line["verdict"] in ("refused", "failed", "unequal")}
    return head + body + "\n" + "".join(f"- {cell}: {said}\n" for said, cell in why.items())


def main() -> int:
    """Try the cells that are not there yet."""
    options = asked(__doc__, only=[""], again=False, timeout=600.0, out=ROOT / ".demo" / "meshes")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    load_inputs(out)
    done = out / "cells.jsonl"
    lines = {line["cell"]: line for line in read_lines(done)}
    alone: dict[str, Found] = {}
    for cell in sorted(cells(), key=lambda cell: LAYOUTS[cell.layout].processes):
        before = lines.get(str(cell))
        if not any(text in str(cell) for text in options.only):
            continue
        if before is not None and not (options.again and before["verdict"] not in ("equal", "refused")):
            continue
        line = lines[str(cell)] = tried(cell, out, alone, options.timeout)
        with done.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        far = "" if line["apart"] is None else f" {line['apart']:.1e}"
        print(f"{line['verdict']:8}{far} {cell} {line['said']}", flush=True)
    (out / "table.md").write_text(table(lines), encoding="utf-8")
    counts = Counter(line["verdict"] for line in lines.values())
    print(f"{len(lines)} cells: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    wrong = [cell for cell, one in lines.items() if one["verdict"] in ("unequal", "failed")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
