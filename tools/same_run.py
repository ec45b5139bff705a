"""Shows that two trees train the same: five recipes by each, and what must not differ between them.

    git worktree add ../before COMMIT
    python tools/same_run.py --model DIR --against ../before [--only sft muon ...]

The recipes are full fine-tuning, LoRA with dropout and accumulation, pre-training from random weights, Muon on two
processes, and a custom loss. Of each run it compares the SHA-256 of the last checkpoint's tensors, what the recipe
determines in every line of metrics.jsonl (losses of steps and evaluations, gradient norms, rates, tokens), the order of
the rows, and the sample answers. A table goes to stderr, one JSON object to stdout; exit 1 where something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHAT = "data: {train: chats.jsonl, eval: 8 documents, max_length: 192}\n"
SIZES = ("hidden_size: 64", "intermediate_size: 128", "num_hidden_layers: 2", "num_attention_heads: 4")
SMALL = "{" + ", ".join((*SIZES, "num_key_value_heads: 2")) + "}"
BATCH = "global_batch_size: 8, micro_batch_size: 2, device: cpu"
RECIPES = {
    "sft": f"model: {{name_or_path: ./model}}\n{CHAT}train: {{duration: 8 steps, {BATCH}}}\n",
    "lora": f"model: {{name_or_path: ./model}}\nadapter: {{kind: lora, r: 8, dropout: 0.1}}\n{CHAT}"
    f"train: {{duration: 8 steps, {BATCH}, precision: fp32}}\noptimizer: {{lr: 1e-3}}\n",
    "pretrain": f"model: {{name_or_path: ./model, init: random, config: {SMALL}}}\nmethod: {{kind: pretrain}}\n"
    f"data: {{train: texts.jsonl, eval: 5%, max_length: 128}}\ntrain: {{duration: 2 epochs, {BATCH}}}\n",
    "muon": f"model: {{name_or_path: ./model, init: random, config: {SMALL}}}\n{CHAT}"
    "optimizer: {kind: muon, lr: 1e-2}\n"
    f"train: {{duration: 12 steps, {BATCH}, precision: fp32}}\nparallel: {{processes: 2}}\n",
    "custom": "model: {name_or_path: ./model}\nmethod: {kind: custom, use: my_loss.py:with_z_loss, rows: sft}\n"
    f"{CHAT}train: {{duration: 6 steps, {BATCH}, precision: fp32}}\n",
}
COMMON = "checkpoint: {every: 4 steps}\neval: {every: 4 steps, samples: 2}\nlogging: {level: warning}\nseed: 7\n"
LOSS = """
def with_z_loss(weight=1e-4):
    def objective(hidden, head, bias, targets):
        logits = (hidden @ head.to(hidden.dtype).T).float()
        z = logits.logsumexp(-1)
        loss = (z - logits.gather(-1, targets[:, None])[:, 0]).sum()
        penalty = weight * z.square().sum()
        return loss + penalty, {"z_loss": penalty}
    return objective
"""
CLOCKED = {"step_s", "data_s", "tok_per_s", "trained_per_s", "mem_gib", "data_wait", "mfu", "eval_s", "samples_s"}
ORDER = """
import hashlib, json, sys
from pathlib import Path
from tuner.data.batches import GlobalBatches
from tuner.data.prepared import open_prepared
rows = open_prepared(Path(sys.argv[1])).train
batches = GlobalBatches(rows, seed=7, shuffle=True, global_batch_size=8, micro_batch_size=2, rank=0, world_size=1)
digest = hashlib.sha256()
for step in range(int(sys.argv[2])):
    digest.update(batches.step(step).row_ids.tobytes())
    for batch in batches.step(step).micro:
        digest.update(batch.input_ids.tobytes() + batch.targets.tobytes() + batch.position_ids.tobytes())
print(digest.hexdigest())
"""
TENSORS = """
import sys
from pathlib import Path
from tuner.checkpoint.load import content_sha256, open_checkpoint
print(content_sha256(open_checkpoint(Path(sys.argv[1]))))
"""


def write_data(directory: Path) -> None:
    """Chats and texts of uneven length, the same every time."""
    draw = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfglm" for b in "aeiou" for c in "nrst"]
    with (directory / "chats.jsonl").open("w") as chats, (directory / "texts.jsonl").open("w") as texts:
        for _ in range(160):
            said = [" ".join(draw.choices(words, k=draw.randint(2, 24))) for _ in range(2 * draw.randint(1, 2))]
            roles = ["user", "assistant"] * (len(said) // 2)
            turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            chats.write(json.dumps({"messages": turns}) + "\n")
            texts.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 200)))}) + "\n")
    (directory / "my_loss.py").write_text(LOSS)


def outcome(tree: Path, work: Path, name: str) -> dict[str, str]:
    """Train one recipe by a tree: digests of its tensors, figures, order and samples."""
    environment = {**os.environ, "TUNER_CACHE": str(work / "cache"), "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    recipe = work / f"{name}.yaml"
    recipe.write_text(RECIPES[name] + COMMON + f"name: {name}\noutput_dir: ./runs\n")

    def call(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=work
        )
        if done.returncode != 0:
            raise SystemExit(f"{tree}, {name}: exit code {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout.strip()

    prepared = call("-m", "tuner", "prepare-data", str(recipe))
    told: dict[str, Any] = json.loads(call("-m", "tuner", "train", str(recipe), "--json"))
    run = Path(told["artifacts"]["path"])
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    determined = [{key: value for key, value in line.items() if key not in CLOCKED} for line in figures]
    steps = sum(line["kind"] == "train" for line in figures)
    samples = (run / "samples.jsonl").read_bytes() if (run / "samples.jsonl").exists() else b""
    return {
        "tensors": call("-c", TENSORS, told["artifacts"]["checkpoint"]),
        "figures": hashlib.sha256(json.dumps(determined).encode()).hexdigest(),
        "order": call("-c", ORDER, prepared, str(steps)),
        "samples": hashlib.sha256(samples).hexdigest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    options = parser.parse_args()
    trees = {"this": Path(__file__).resolve().parents[1], "other": options.against.resolve()}
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name in options.only:
        found[name] = {}
        for which, tree in trees.items():
            with tempfile.TemporaryDirectory(prefix="tuner-same-") as directory:
                work = Path(directory)
                (work / "model").symlink_to(options.model.resolve())
                write_data(work)
                found[name][which] = outcome(tree, work, name)
        one, other = found[name].values()
        shown = "  ".join(f"{key} {one[key][:12]} {'=' if one[key] == other[key] else '!='}" for key in one)
        print(f"{name:<9} {shown}", file=sys.stderr)
    same = all(sides["this"] == sides["other"] for sides in found.values())
    print(json.dumps({"same": same, "recipes": found}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
