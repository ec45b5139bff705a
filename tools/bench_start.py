"""What a launch costs before its first step: seconds by phase, processor seconds, and the host's memory.

    python tools/bench_start.py --smollm2 DIRECTORY [--large DIRECTORY] [--against TREE] [--rounds 3]

Trains two steps of LoRA on SmolLM2, launch after launch: the first with an empty cache, the second with what the first
left there; alternating with another tree of this project where one is given (its `.venv` included), and with the bare
imports of torch, transformers and peft; then with an evaluation and answers before the first step, and `verify-resume`
of that run. With ``--prediction`` what a launch of an 8B with LoRA settles for a GPU of the table, and the same again,
as the second launch does. With ``--large`` an 8B with LoRA, whose random files, 16 GB, are written there where they are
not: the processor seconds of its proof alone, and two launches of one step. With ``--ranks`` eight processes of this
machine start on a model whose weights take 2 GB, in full (float32, from bf16) and with LoRA (bf16), the latter of a
mixture of experts, too. Of each, seconds by phase, and the largest anonymous memory of all processes before the step,
beyond as many bare imports. A line of JSON for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
"""Those of Llama 3.1 8B."""
SMALLER: dict[str, Any] = SIZES | {"hidden_size": 2048, "intermediate_size": 5632}
IN_2_GB = {
    "full": SMALLER | {"num_hidden_layers": 9, "vocab_size": 16032}, "lora": SMALLER | {"num_hidden_layers": 10},
    "mixture": {
        "model_type": "qwen3_moe", "vocab_size": 16032, "hidden_size": 1024, "num_hidden_layers": 10, "num_experts": 64,
        "moe_intermediate_size": 512, "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64,
    },
}  # fmt: skip
"""By what is trained, of the model whose weights take 2 GB: in float32 as all are trained, in bf16 as none are; of a
mixture, an adapter."""
RANKS = 8
BARE = "import torch, transformers, peft; from transformers import AutoModelForCausalLM, AutoTokenizer"
PROOF = """
import json, sys, time, threading
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM

peak = [0]
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.02)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
began, used = time.monotonic(), time.process_time()
model = build_model(ModelSpec(sys.argv[1]), torch.bfloat16, 0)
add_lora(model, LoraSpec(16, 32.0, 0.0, "all-linear"), seed=0)
root = CausalLM(model.eval())
built, built_used = time.monotonic(), time.process_time()
report = require_isolation(root, model.config.vocab_size, longest=2048)
print(json.dumps({
    "what": "proof of an 8B LoRA", "clean": report.is_clean,
    "weights_s": built - began, "weights_cpu_s": built_used - used,
    "s": time.monotonic() - built, "cpu_s": time.process_time() - built_used, "anonymous_gb": (peak[0] - before) / 1e9,
}))
"""
PREDICTION = """
import json, sys, time
from dataclasses import asdict
from tuner.config.dump import recipe_dict
from tuner.config.load import load_recipe
from tuner.profile import devices
from tuner.run.settle import answer_of
from tuner.runtime.dist import RankInfo

import torch, transformers, peft
from transformers import AutoModelForCausalLM
card = devices.find_device(sys.argv[2])
devices.present_device = lambda kind: card
recipe = load_recipe(f"{sys.argv[1]}/recipe.yaml").recipe
job = {"recipe": recipe_dict(recipe), "ranks": asdict(RankInfo()), "data": sys.argv[3], "cache": sys.argv[1]}
for what in ("first", "second"):
    began, used = time.monotonic(), time.process_time()
    values = answer_of(job)["values"]
    print(json.dumps({
        "what": f"{what} choice for an 8B LoRA on {card.shown}", "values": values,
        "s": round(time.monotonic() - began, 2), "cpu_s": round(time.process_time() - used, 2),
    }))
"""
ROWS = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(40)]
BEGUN = [{"prompt": f"There were {n} cats in the old house, and", "completion": " a dog slept."} for n in range(40)]
"""A base model goes on with these."""


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--prediction", metavar="DEVICE", help="such as h200-141g")
    parser.add_argument("--large", type=Path)
    parser.add_argument("--ranks", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    trees = [ROOT] if given.against is None else [ROOT, given.against.resolve()]
    if given.smollm2 is not None:
        for number in range(given.rounds):
            print(json.dumps({"round": number, **bare()}), flush=True)
            for tree in trees:
                for line in launches(tree, given.smollm2.resolve()):
                    print(json.dumps({"round": number, "tree": str(tree), **line}), flush=True)
                evaluated = first_evaluation(tree, given.smollm2.resolve())
                print(json.dumps({"round": number, "tree": str(tree), **evaluated}), flush=True)
    if given.prediction is not None:
        for tree in trees:
            for line in predictions(tree, given.prediction):
                print(json.dumps({"tree": str(tree), **json.loads(line)}), flush=True)
    if given.large is not None:
        if not (given.large / "model.safetensors.index.json").is_file():
            write_large(given.large, SIZES)
        for tree in trees:
            done = _run(tree, ["-c", PROOF, str(given.large.resolve())], tree)[0]
            print(done.stdout.strip(), flush=True)
            for found in whole_launches(tree, given.large.resolve(), "lora", 1):
                print(json.dumps({"tree": str(tree), **found}), flush=True)
    for kind, sizes in IN_2_GB.items() if given.ranks is not None else ():
        if not (given.ranks / kind / "model.safetensors.index.json").is_file():
            write_large(given.ranks / kind, sizes)
        for tree in trees:
            for found in whole_launches(tree, (given.ranks / kind).resolve(), kind, RANKS):
                print(json.dumps({"tree": str(tree), **found}), flush=True)
    return 0


def bare() -> dict[str, Any]:
    """The imports that a training cannot go without, in a process of their own."""
    return {"what": "bare imports", **_run(ROOT, ["-c", BARE], ROOT)[1]}


def launches(tree: Path, model: Path) -> list[dict[str, Any]]:
    """A first launch, with nothing in the cache but the prepared data, and a second one."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        recipe = {
            "model": {"name_or_path": str(model)}, "output_dir": "run", "adapter": {"kind": "lora"},
            "data": {"train": "rows.jsonl", "cache_dir": "cache", "max_length": 256},
            "train": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
        }  # fmt: skip
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        prepared = _run(tree, ["-m", "tuner", "prepare-data", "recipe.yaml"], place)[0]
        assert prepared.returncode == 0, prepared.stderr
        for number, name in enumerate(("first", "second")):
            done, used = _run(tree, ["-m", "tuner", "train", "recipe.yaml", "--output-dir", f"run{number}"], place)
            assert done.returncode == 0, done.stderr
            record = json.loads((place / f"run{number}" / "run.json").read_text())
            found.append({"what": f"{name} launch", "start_s": record["launches"][-1].get("start_s"), **used})
    return found


def first_evaluation(tree: Path, model: Path) -> dict[str, Any]:
    """An evaluation and three answers before the first step, and what `verify-resume` of that run takes."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name, rows in (("rows", BEGUN), ("held", BEGUN[:3])):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {
            "model": {"name_or_path": str(model)}, "output_dir": "run", "adapter": {"kind": "lora"},
            "data": {"train": "rows.jsonl", "eval": "held.jsonl", "cache_dir": "cache", "max_length": 256},
            "train": {"duration": "4 steps", "global_batch_size": 2, "device": "cpu"},
        }  # fmt: skip
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        done, _ = _run(tree, ["-m", "tuner", "train", "recipe.yaml"], place)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        found = next(line for line in lines if "samples_s" in line)
        samples = [json.loads(line) for line in (place / "run" / "samples.jsonl").read_text().splitlines()]
        verified, used = _run(tree, ["-m", "tuner", "verify-resume", "run"], place)
        assert verified.returncode == 0, verified.stderr
        return {
            "what": "evaluation and answers at step 0; verify-resume", "eval_s": found.get("eval_s"),
            "samples_s": found["samples_s"], "answers": [line["answer"] for line in samples if not line["step"]],
            "verify_s": used["s"], "verify_cpu_s": used["cpu_s"],
        }  # fmt: skip


def predictions(tree: Path, device: str) -> list[str]:
    """What a launch settles by prediction, and the second one; nothing is kept before. Lines of JSON."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **SIZES}
        (place / "config.json").write_text(json.dumps(config))
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 500))
        recipe = {
            "model": {"name_or_path": str(place), "init": "random"}, "tokenizer": {"name_or_path": "byte"},
            "data": {"train": "rows.jsonl", "cache_dir": "cache", "max_length": 4096}, "adapter": {"kind": "lora"},
            "train": {"duration": "100 steps", "global_batch_size": 16, "precision": "bf16", "device": "cuda"},
        }  # fmt: skip
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        prepared = _run(tree, ["-m", "tuner", "prepare-data", "recipe.yaml"], place)[0]
        assert prepared.returncode == 0, prepared.stderr
        data = str(place / prepared.stdout.strip())
        done, _ = _run(tree, ["-c", PREDICTION, directory, device, data], place)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout.splitlines()


def whole_launches(tree: Path, model: Path, kind: str, processes: int) -> list[dict[str, Any]]:
    """A launch and, of one process, a second one, of one step each: seconds by phase, and the most anonymous memory of
    all processes before the step, beyond what as many bare imports take."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        recipe = {
            "model": {"name_or_path": str(model), "dtype": "fp32" if kind == "full" else "bf16"},
            "tokenizer": {"name_or_path": "byte"}, "output_dir": "run",
            "adapter": {"kind": "none" if kind == "full" else "lora"},
            "data": {"train": "rows.jsonl", "cache_dir": "cache", "max_length": 64},
            "optimizer": {"lr": 1e-4}, "checkpoint": {"at_end": False},
            "train": {"duration": "1 step", "global_batch_size": processes, "device": "cpu", "precision": "bf16"},
        }  # fmt: skip
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        prepared = _run(tree, ["-m", "tuner", "prepare-data", "recipe.yaml"], place)[0]
        assert prepared.returncode == 0, prepared.stderr
        python = str(tree / ".venv" / "bin" / "python")
        starter = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
        sleeper = f"{BARE}; import time; print(1, flush=True); time.sleep(9)"
        bare_bytes = processes * _anonymous_of([python, "-c", sleeper])
        found = []
        for number in range(1 if processes > 1 else 2):
            words = [python, *starter, "-m", "tuner", "train", "recipe.yaml", "--output-dir", f"run{number}"]
            used, seen = _watched(tree, words, place, processes)
            run = place / f"run{number}"
            phases = json.loads((run / "run.json").read_text())["launches"][-1].get("start_s", {})
            first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
            # A tree that does not know its phases: up to the line of the first step, less its seconds.
            before = sum(phases.values()) - phases["first step"] if phases else used.pop("told_s") - first["step_s"]
            most = max(size for at, size in seen if at < before) - bare_bytes
            found.append({
                "what": f"{processes} processes, {kind}, launch {number + 1}", "start_s": phases,
                "before_step_s": round(before, 1), **used, "bare_gb": round(bare_bytes / 1e9, 2),
                "beyond_bare_gb": round(most / 1e9, 2),
            })  # fmt: skip
        return found


def _watched(
    tree: Path, words: list[str], place: Path, processes: int
) -> tuple[dict[str, float], list[tuple[float, int]]]:
    """What a launch took, and its anonymous memory at each moment since its processes were there."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    usage, began, born, told_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), None, 0.0
    seen: list[tuple[float, int]] = []
    metrics = place / words[-1] / "metrics.jsonl"
    with (place / "told").open("w+") as told:
        started = subprocess.Popen(words, cwd=place, env=environment, stdout=told, stderr=told)
        while started.poll() is None:
            size, count = _anonymous(started.pid)
            born = born or (time.monotonic() if count >= processes else None)
            seen += [(time.monotonic() - born, size)] if born else []
            if not told_s and born and metrics.is_file() and metrics.stat().st_size:
                told_s = time.monotonic() - born
            time.sleep(0.1)
    assert started.returncode == 0, (place / "told").read_text()[-3000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {"s": round(time.monotonic() - began, 1), "cpu_s": round(cpu_s, 1), "told_s": round(told_s, 1)}, seen


def _anonymous(process: int) -> tuple[int, int]:
    """Bytes of anonymous memory of a process and of all that it started, and how many these are."""
    facts: dict[int, tuple[int, int]] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError):
            told = dict(line.split(":", 1) for line in status.read_text().splitlines())
            facts[int(told["Pid"])] = int(told["PPid"]), int(told["RssAnon"].split()[0]) * 1024
    found = {process}
    while more := {pid for pid, (parent, _) in facts.items() if parent in found} - found:
        found |= more
    return sum(facts[pid][1] for pid in found if pid in facts), len(found)


def _anonymous_of(words: list[str]) -> int:
    """The same of a process that has said something."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        found, _ = _anonymous(started.pid)
        started.kill()
    return found


def write_large(directory: Path, sizes: dict[str, Any]) -> None:
    """Files of a model of these sizes in bf16, a Llama unless they say another type, random, in shards of 2 GB."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.insert(0, str(ROOT))
    from tuner.model.published import converted

    directory.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**{"model_type": "llama", **sizes}, dtype="bfloat16")
    config.save_pretrained(directory)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    drawn = (torch.randn(1 << 26) * 0.02).bfloat16()
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    tensors = [one for name, whole in meta.state_dict().items() for one in converted(meta, name, whole).items()]
    for place, (name, tensor) in enumerate(tensors):
        count = tensor.numel()
        shard[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
        if tensor.ndim > 1:
            shard[name] = drawn.repeat(-(-count // len(drawn)))[:count].roll(place).view(tensor.shape)
        if place == len(tensors) - 1 or sum(one.nbytes for one in shard.values()) > 2e9:
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard = {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _run(tree: Path, arguments: list[str], cwd: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, float]]:
    """A command of a tree's Python, and what it took."""
    python = tree / ".venv" / "bin" / "python"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [str(python if python.is_file() else sys.executable), *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tree)}, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, {"s": round(time.monotonic() - began, 2), "cpu_s": round(used, 2)}


if __name__ == "__main__":
    sys.exit(main())
