"""Optimizer states in 8 bits and weights rounded stochastically over one, two and four processes, against one alone.

    python -m tools.reshard_campaign --changes 1,2,4,1 1,4,2,1 --steps 3

A llama of 2 layers whose rows do not divide evenly takes steps with drawn gradients, the same at any number of
processes; at each change a checkpoint is saved by so many processes and read by as many as come next. Prints one JSON
line per list and way: whether the last checkpoint's tensors (weights, codes, scales, moments) have the SHA-256 of a run
in one process. Exits with 1 where one differs.
"""

import json
from pathlib import Path

from tests.multi import compact_worker, launcher
from tools.commands import parser_of, workplace


def trained(directory: Path, way: str, worlds: list[int], steps: int) -> str:
    """The hash of what is left after so many steps at each of these numbers of processes."""
    from tuner.checkpoint.load import content_sha256
    from tuner.checkpoint.open import open_checkpoint

    source, name = "-", "-".join(map(str, worlds))
    for number, world in enumerate(worlds):
        first, target = number * steps, directory / f"{way}-{name}-{number}"
        words = [compact_worker.__file__, str(directory), way, source, str(first), str(first + steps), str(target)]
        source = launcher.run(words, world).split()[-1]
    return content_sha256(open_checkpoint(Path(source)))


def main() -> int:
    """Run the campaign."""
    parser = parser_of(__doc__)
    parser.add_argument("--changes", nargs="+", default=["1,2,4,1", "1,4,2,1", "4,2,1,4"])
    parser.add_argument("--steps", type=int, default=3, help="between changes")
    options = parser.parse_args()
    from tests.train.synthetic import write_model

    good = True
    with workplace() as directory:
        write_model(directory)
        for way in compact_worker.WAYS:
            for text in options.changes:
                worlds = [int(number) for number in text.split(",")]
                whole = trained(directory, way, [1] * len(worlds), options.steps)
                same = trained(directory, way, worlds, options.steps) == whole
                good = good and same
                facts = {"way": way, "processes": worlds, "change_every": options.steps, "same_bits": same}
                print(json.dumps(facts), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
