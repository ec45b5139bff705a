"""Change the number of processes of a run twice, and hold sample order and losses against a run that never changes it.

    python -m tools.elastic_campaign --changes 1,2,1 1,4,2 --steps 110 --lr 1e-3 --seed 0

A llama of 2 layers (width 32, vocabulary 300) is trained in full from random weights in float32 on rows of repeated
words, 8 rows a step, for three times so many steps: once in one process, and once for every list of numbers of
processes, with a stop and a resume wherever the number changes. In each step every rank notes a hash of the global
batch's rows, in order. Prints one JSON line per list: how far the loss fell, whether every step had the same rows on
every rank, and the largest relative difference of the loss to the unbroken run over the 10 and the 100 steps behind
each change. Exits with 1 where rows differ, or a loss by more than 1e-6 over 10 steps or 1e-5 over 100, or where it
fell by less than 1.
"""

import random
from pathlib import Path
from typing import Any

from tools.commands import STOPPED, Results, asked, launch, read_lines, workplace, write_lines

BOUNDS = {10: 1e-6, 100: 1e-5}
FALL = 1.0
WORDS = ("garden", "hose", "pump", "valve", "meter", "tap", "pipe", "seal")
RECIPE = """\
model: {{name_or_path: ./model}}
tokenizer: {{name_or_path: byte}}
data: {{train: rows.jsonl, max_length: 64, packing: false}}
train: {{duration: {total} steps, global_batch_size: 8, micro_batch_size: 2, precision: fp32, device: cpu}}
optimizer: {{lr: {lr}}}
schedule: {{kind: cosine, warmup: 5%}}
checkpoint: {{every: never}}
seed: {seed}
logging: {{level: warning}}
"""
# Each rank notes the rows of every step that it asks for; rows asked for ahead of a stop are asked for again.
NOTED = """
import hashlib, os, sys
from tuner.data.batches import GlobalBatches
real = GlobalBatches.step
file = open(f"order-{sys.argv[1]}-{os.environ.get('RANK', '0')}", "a")
def step(batches, index):
    found = real(batches, index)
    print(index, hashlib.sha256(found.row_ids.tobytes()).hexdigest(), file=file, flush=True)
    return found
GlobalBatches.step = step
from tuner.cli.main import main
main(sys.argv[2:])
"""


def prepare(directory: Path, total: int, lr: float, seed: int) -> None:
    """Write model, rows and recipe."""
    from tests.fixtures import trainings

    trainings.prepare(directory, 1)
    rng = random.Random(seed)
    rows = []
    for number in range(97):
        word = rng.choice(WORDS)
        rows.append({"prompt": f"{number} ", "completion": " ".join([word] * rng.randint(2, 6))})
    write_lines(directory / "rows.jsonl", rows)
    (directory / "r.yaml").write_text(RECIPE.format(total=total, lr=lr, seed=seed))


def train(directory: Path, name: str, worlds: list[int], steps: int) -> None:
    """Train a run in as many launches as there are numbers of processes."""
    for number, world in enumerate(worlds):
        words = ["-c", NOTED, name, "train", "r.yaml", "--name", name, "--resume", "auto"]
        is_last = number == len(worlds) - 1
        codes = launch(directory, world, words if is_last else [*words, "--train.stop_after", f"{steps} steps"])
        if set(codes) != {0 if is_last else STOPPED}:
            raise RuntimeError(f"{name} on {world}: {codes}\n{(directory / 'rank0.log').read_text()[-2000:]}")


def orders(directory: Path, name: str) -> dict[int, set[str]]:
    """The hashes of each step's rows that any rank of any launch noted."""
    found: dict[int, set[str]] = {}
    for path in directory.glob(f"order-{name}-*"):
        for line in path.read_text().splitlines():
            index, digest = line.split()
            found.setdefault(int(index), set()).add(digest)
    return found


def losses(directory: Path, name: str) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in read_lines(directory / "runs" / name / "metrics.jsonl")]


def compare(directory: Path, name: str, steps: int, whole: list[float]) -> dict[str, Any]:
    """A run that changed its number of processes against the unbroken one."""
    own, rows, wanted = losses(directory, name), orders(directory, name), orders(directory, "whole")
    apart = [abs(a - b) / abs(b) for a, b in zip(own, whole, strict=True)]
    worst = {length: max(max(apart[change : change + length]) for change in (steps, 2 * steps)) for length in BOUNDS}
    same_rows = rows == wanted and len(rows) == len(whole) and all(len(digests) == 1 for digests in rows.values())
    return {
        "same_rows": same_rows, "steps": len(own), "fell_by": round(whole[0] - min(whole), 3),
        **{f"apart_over_{length}": difference for length, difference in worst.items()},
        "good": same_rows and all(worst[n] <= bound for n, bound in BOUNDS.items()) and whole[0] - min(whole) >= FALL,
    }


def campaign(changes: list[list[int]], steps: int, lr: float, seed: int) -> list[dict[str, Any]]:
    """All lists of numbers of processes against one unbroken run."""
    results = Results()
    with workplace() as directory:
        prepare(directory, 3 * steps, lr, seed)
        train(directory, "whole", [1], steps)
        whole = losses(directory, "whole")
        for worlds in changes:
            name = "-".join(map(str, worlds))
            train(directory, name, worlds, steps)
            facts = {"processes": worlds, "change_after": [steps, 2 * steps], "lr": lr, "seed": seed}
            results.add({**facts, **compare(directory, name, steps, whole)})
    return results.rows


def main() -> int:
    """Run the campaign."""
    options = asked(__doc__, changes=["1,2,1", "1,4,2"], steps=(110, "between changes"), lr=0.001, seed=0)
    changes = [[int(number) for number in text.split(",")] for text in options.changes]
    results = campaign(changes, options.steps, options.lr, options.seed)
    return 0 if all(result["good"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
