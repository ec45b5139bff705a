"""Shows that two trees train the same: 27 runs by each, and what must not differ between them.

    git worktree add ../before COMMIT
    python -m tools.same_run --model DIR --against ../before [--only sft muon ...]

The first five recipes are those of most users: full fine-tuning, LoRA with dropout and accumulation, pre-training from
random weights, Muon on two processes, and a custom loss. The others have a part each, on a model of two layers; those
called ``resumed`` stop in the middle and continue. Of each run it compares the SHA-256 of the last checkpoint's
tensors, what the recipe determines in every line of metrics.jsonl (losses of steps and evaluations, gradient norms,
rates, tokens), the order of the rows (but of windows and ladders), and the sample answers. A table goes to stderr, one
JSON object to stdout; exit 1 where something differs.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.commands import STOPPED, asked, done, environment, run, some, workplace
from tools.tables import beside

Tree = Mapping[str, Any]
"""The exit code of a launch that was asked to stop, and saved."""
_TABLE = beside(__file__)
RECIPES: dict[str, Tree] = _TABLE["recipes"]
COMMON: Tree = _TABLE["common"]
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
CLOCKED |= {"attention_share", "elapsed_s", "chinchilla"}  # which a tree of before has not
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
from tuner.checkpoint.load import content_sha256
try:
    from tuner.checkpoint.open import open_checkpoint
except ModuleNotFoundError:  # an earlier tree
    from tuner.checkpoint.load import open_checkpoint
print(content_sha256(open_checkpoint(Path(sys.argv[1]))))
"""


MODELS = """
import sys
from pathlib import Path
from shutil import copy
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
real = Path("model")
base = AutoConfig.from_pretrained(real)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
for key, value in sizes.items():
    setattr(base, key, value)
base.head_dim = 16
experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
mixture = Qwen3MoeConfig(vocab_size=base.vocab_size, **sizes, **experts)
for seed, (name, config) in enumerate({"tiny": base, "other": base, "mixture": mixture}.items()):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(name)
    for file in real.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            copy(file, name)
"""


def write_data(directory: Path) -> None:
    """Chats, texts, pairs, labelled answers and windows of uneven length, the same every time."""
    draw = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfglm" for b in "aeiou" for c in "nrst"]

    def said() -> str:
        return " ".join(draw.choices(words, k=draw.randint(2, 24)))

    windows = ("w/one", "w/two", "w/three")
    rows: dict[str, list[Tree]] = {name: [] for name in ("chats", "texts", "pairs", "labelled", *windows)}
    for _ in range(160):
        texts = [said() for _ in range(2 * draw.randint(1, 2))]
        roles = ["user", "assistant"] * (len(texts) // 2)
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        rows["chats"].append({"messages": turns})
        rows["texts"].append({"text": " ".join(draw.choices(words, k=draw.randint(5, 200)))})
    for number in range(90):
        rows["pairs"].append({"prompt": said(), "chosen": said(), "rejected": said()})
        rows["labelled"].append({"prompt": said(), "completion": said(), "label": number % 2 == 0})
    for number, row in enumerate(rows["chats"]):
        rows[windows[number % 3]].append(row)
    (directory / "w").mkdir()
    for name, records in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "my_loss.py").write_text(LOSS)


MANY_DIRECTORIES = ("windows", "resumed windows", "ladder")
"""What trains on rows that `prepare-data` does not prepare as one directory."""


class Work:
    """A directory in which one recipe is trained by one tree."""

    def __init__(self, tree: Path, directory: Path, models: Path) -> None:
        self.tree, self.directory = tree, directory
        for model in models.iterdir():
            (directory / model.name).symlink_to(model.resolve())
        write_data(directory)

    def call(self, *command: str, code: int = 0) -> str:
        """What a command of the tree prints. SystemExit where it ends with another code."""
        done = run(command, self.directory, environment(self.directory / "cache", PYTHONPATH=str(self.tree)))
        if done.returncode != code:
            what = f"{self.tree}: {' '.join(command[2:])}: exit code {done.returncode}"
            raise SystemExit(f"{what}\n{done.stderr[-4000:]}")
        return done.stdout.strip()

    def trained(self, name: str) -> Path:
        """The run directory of a recipe that was trained."""
        label = name.replace(" ", "-")
        recipe = self.directory / f"{label}.yaml"
        recipe.write_text(json.dumps({**COMMON, **RECIPES[name], "name": label, "output_dir": f"./runs/{label}"}))
        if name == "ladder":
            self.call("-m", "tuner", "ladder", "run", recipe.name, code=STOPPED)
            return self.directory / "runs" / label / "rung"
        run = self.directory / "runs" / label
        if name.startswith("resumed"):
            self.call("-m", "tuner", "train", recipe.name, "--train.stop_after", "5 steps", code=STOPPED)
            self.call("-m", "tuner", "resume", str(run))
        else:
            self.call("-m", "tuner", "train", recipe.name)
        return run

    def outcome(self, name: str) -> dict[str, str]:
        """Digests of tensors, figures, order and samples of a recipe that was trained."""
        run = self.trained(name)
        figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        determined = [{key: value for key, value in line.items() if key not in CLOCKED} for line in figures]
        count = sum(line["kind"] == "train" for line in figures)
        samples = (run / "samples.jsonl").read_bytes() if (run / "samples.jsonl").exists() else b""
        last = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
        return {
            "tensors": self.call("-c", TENSORS, str(last)),
            "figures": hashlib.sha256(json.dumps(determined).encode()).hexdigest(), "order": self.ordered(name, count),
            "samples": hashlib.sha256(samples).hexdigest(),
        }

    def ordered(self, name: str, count: int) -> str:
        """The digest of so many global batches of a recipe."""
        if name in MANY_DIRECTORIES:
            return ""
        prepared = self.call("-m", "tuner", "prepare-data", f"{name.replace(' ', '-')}.yaml")
        return self.call("-c", ORDER, prepared, str(count))


def main() -> int:
    options = asked(
        __doc__, model={"type": Path, "required": True}, against={"type": Path, "required": True}, only=some(RECIPES),
    )
    trees = {"this": Path(__file__).resolve().parents[1], "other": options.against.resolve()}
    found: dict[str, dict[str, dict[str, str]]] = {}
    with workplace() as models:
        (models / "model").symlink_to(options.model.resolve())
        done(["-c", MODELS], models, dict(os.environ))
        for name in options.only:
            found[name] = {}
            for which, tree in trees.items():
                with workplace() as directory:
                    found[name][which] = Work(tree, directory, models).outcome(name)
            one, other = found[name].values()
            shown = "  ".join(f"{key} {one[key][:12]} {'=' if one[key] == other[key] else '!='}" for key in one)
            print(f"{name:<23} {shown}", file=sys.stderr, flush=True)
    same = all(sides["this"] == sides["other"] for sides in found.values())
    print(json.dumps({"same": same, "recipes": found}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
