"""A quantised base: memory while it is read and trained, held-out loss, and losses on 1, 2 and 4 ranks.

    python -m tools.quantized_task [--smollm2 DIR] [--only ranks reading task] [--steps 30] [--rows 8]

``ranks`` trains a tiny model on nf4 and int8 codes with LoRA and DoRA, in 1, 2 and 4 processes (also as two copies of
two shards, and as four copies), in float32: losses must be equal within 1e-6. ``reading`` draws a model of 0.5 B
parameters in bfloat16 files and reads it in a process of its own: the most memory of its own that this process took
(RssAnon; mapped files are the system's) against the size of the base. ``task`` trains the shipped LoRA recipe on
SmolLM2 with the base in bf16, nf4 and int8: peak of tensors, counted in real steps, and the loss on held-out rows. A
table goes to stderr, one JSON object to stdout; exit 1 where a bound is missed.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from tools.commands import ROOT, Start, asked, done, environment, read_lines, say, some, trained, tuner, workplace

APART = 1e-6
READING_SHARE = 0.5
"""Of the bf16 base's bytes, what reading it in 4 bits may take at most: codes, scales, embeddings, one weight."""
LAYOUTS = {"1": (1, "full"), "2": (2, "full"), "4": (4, "full"), "2x2": (4, "hybrid"), "4 copies": (4, "none")}
KINDS = ("nf4", "int8")
DRAWN = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
}
READ = """
import json, sys, threading, time
import torch
from tools.measures import memory
from tuner.model.build import ModelSpec, build_model
from tuner.model.quantize.layers import QuantizeSpec

most, done = 0, False
def watch():
    global most
    while not done:
        most = max(most, memory("RssAnon"))
        time.sleep(0.002)
before = memory("RssAnon")
thread = threading.Thread(target=watch)
thread.start()
spec = None if sys.argv[2] == "none" else QuantizeSpec(sys.argv[2], native=True)
model = build_model(ModelSpec(sys.argv[1], quantize=spec), torch.bfloat16, 1)
done = True
thread.join()
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"most": most - before, "held": held}))
"""


def ranks(directory: Path, start: Start = subprocess.Popen) -> dict[str, Any]:
    """The largest relative difference of any step's loss to that of one process, by base and adapter.

    ``start`` starts each process.
    """
    from tests.fixtures.trainings import prepare

    found: dict[str, Any] = {}
    for kind in KINDS:
        for adapter in ("lora", "dora"):
            place = directory / f"{kind}-{adapter}"
            place.mkdir(parents=True)
            prepare(place, 2)
            text = (place / "r.yaml").read_text()
            text = text.replace("./model}", f"./model, quantize: {kind}}}").replace("kind: lora", f"kind: {adapter}")
            (place / "r.yaml").write_text(text.replace("dropout: 0.2", "dropout: 0.0"))
            losses = {name: _losses(place, name, start) for name in LAYOUTS}
            one = losses["1"]
            apart = {
                name: max(abs(a - b) / abs(b) for a, b in zip(each, one, strict=True)) for name, each in losses.items()
            }
            found[f"{kind} {adapter}"] = apart
            say(f"{kind:4} {adapter}: " + ", ".join(f"{name}: {value:.1e}" for name, value in apart.items()))
    return found


def _losses(place: Path, name: str, start: Start) -> list[float]:
    world, shard = LAYOUTS[name]
    run = f"run-{world}-{shard}"
    words = ["-m", "tuner", "train", "r.yaml", "--name", run, "--parallel.shard", shard]
    trained(place, world, words, start)
    return [line["loss"] for line in read_lines(place / "runs" / run / "metrics.jsonl", "train")]


def reading(directory: Path) -> dict[str, Any]:
    """Memory of its own that a process takes to read a drawn base, and what the model holds then."""
    import torch
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**DRAWN)).to(torch.bfloat16)
    size = sum(p.numel() * 2 for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(directory / "drawn", max_shard_size="400MB")
    del model
    found: dict[str, Any] = {"base": size}
    for kind in ("none", *KINDS):
        words = ["-c", READ, str(directory / "drawn"), kind]
        found[kind] = json.loads(done(words, None, environment(threads=None)).splitlines()[-1])
        say(f"reading {kind:4}: {found[kind]['most'] / size:5.1%} of the bf16 base at the peak, {found[kind]}")
    return found


def task(directory: Path, smollm2: Path, steps: int, rows: int) -> dict[str, Any]:
    """Peak of tensors and held-out loss of LoRA on SmolLM2, by what the base is held in; so many rows a step."""
    found: dict[str, Any] = {}
    for kind in ("none", *KINDS):
        common = ["smollm2_lora_cpu", "--model.name_or_path", str(smollm2), "--model.quantize", kind]
        common += ["--train.precision", "bf16", "--train.duration", f"{steps} steps", "--eval.samples", "0"]
        common += ["--train.global_batch_size", str(rows), "--output_dir"]
        env = environment(threads=None)
        measured = tuner(None, "profile", *common, str(directory / f"p-{kind}"), "--measure", "1", env=env)
        ended = tuner(None, "train", *common, str(directory / kind), "--eval.every", "never", env=env)
        evals = [line["loss"] for line in read_lines(directory / kind / "metrics.jsonl", "eval")]
        found[kind] = {"measured": measured["metrics"], "loss": evals, "train": ended["metrics"]}
        say(f"{kind:4}: held-out {evals[0]:.4f} -> {evals[-1]:.4f}; {json.dumps(measured['metrics'])[:400]}")
    return found


def missed(report: dict[str, Any]) -> list[str]:
    """The bounds that are not kept."""
    found = [
        f"{case}, {layout}: losses differ by {apart:.1e}"
        for case, by_layout in report.get("ranks", {}).items()
        for layout, apart in by_layout.items()
        if apart > APART
    ]
    if (read := report.get("reading")) is not None and read["nf4"]["most"] > READING_SHARE * read["base"]:
        found.append(f"reading nf4 took {read['nf4']['most'] / read['base']:.0%} of the base's size")
    return found


def main() -> int:
    """Measure what was asked for; print the table and the report."""
    given = asked(
        __doc__, smollm2=ROOT / ".demo" / "smollm2", only=some(("ranks", "reading", "task")), steps=30,
        rows=(8, "of a step"),
    )
    report: dict[str, Any] = {}
    with workplace() as directory:
        if "ranks" in given.only:
            report["ranks"] = ranks(directory / "ranks")
        if "reading" in given.only:
            report["reading"] = reading(directory)
        if "task" in given.only:
            report["task"] = task(directory, given.smollm2.absolute(), given.steps, given.rows)
    report["missed"] = missed(report)
    print(json.dumps(report))
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
