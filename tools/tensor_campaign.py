"""Every causal type of transformers with its layers split over two processes: a step as in one, or refused, and why.

    python -m tools.tensor_campaign [--only TYPE ...] [--adapter lora|dora] [--out FILE]

Each type, tiny, takes a step of two micro-batches in float32, in one process and in two that compute its layers as one:
loss and gradient norm to 1e-6, and every gradient to 5e-6 of itself, or of a fiftieth of all of them. Prints a line for
each, and exits with 1 where one differs or fails.
"""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.processes import run_ranks
from tests.fixtures.split import Alone, Split, differences
from tools.causal_cases import TYPES, quiet, tiny_config
from tools.commands import asked, one_line, one_of, verdicts, workplace
from tuner.errors import RecipeError
from tuner.model.build import ModelSpec, meta_model, model_config
from tuner.model.row_layout import route_of
from tuner.parallel.tensor.plan import check_split

PROCESSES = 2


@quiet()
def main() -> int:
    """Run the types, and print what each came to."""
    given = asked(__doc__, only=list(TYPES), adapter=one_of(("none", "lora", "dora"), "none"), out=Path)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    return verdicts(tried(given.only, given.adapter), given.out)


def tried(types: list[str], adapter: str) -> Iterator[tuple[str, str]]:
    """Each type, with what became of it."""
    for model_type in types:
        with workplace() as directory:
            yield model_type, verdict(model_type, adapter, directory)


def verdict(model_type: str, adapter: str, directory: Path) -> str:
    """`equal`, `refused: why`, `differs: where`, or `not made: why` of a type that transformers itself cannot make."""
    try:
        config = tiny_config(model_type)
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.save_pretrained(directory)
        model = meta_model(model_config(ModelSpec(str(directory), random_init=True)), torch.float32)
    except Exception as error:  # noqa: BLE001 - whatever a class raises
        return f"not made: {one_line(error)}"
    try:
        check_split(model, PROCESSES)
    except RecipeError as error:
        return f"refused: {error}"
    said = directory / "said"
    case = Split(model_type, config, route_of(model)[0], adapter=adapter, accumulated=2)  # type: ignore[arg-type]
    try:
        alone = Alone.of(case, PROCESSES, directory)
    except Exception as error:  # noqa: BLE001 - of the type's own code
        traceback.print_exc()
        return f"differs: {one_line(error)}"

    def work(rank: int) -> None:
        try:
            unlike = differences(case, alone, rank)
        except Exception as error:  # noqa: BLE001 - of the type's own code
            traceback.print_exc()
            unlike = [one_line(error)]
        if rank == 0:
            said.write_text("\n".join(unlike))
        os._exit(int(bool(unlike)))  # the others may wait for a process that failed

    try:
        codes = run_ranks(PROCESSES, directory, work)
    except AssertionError as error:
        return f"differs: {error}"
    lines = said.read_text().splitlines() if said.is_file() else []
    return "equal" if codes == [0] * PROCESSES else f"differs: {lines[0] if lines else codes} ({len(lines)} lines)"


if __name__ == "__main__":
    raise SystemExit(main())
