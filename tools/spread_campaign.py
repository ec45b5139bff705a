"""Hold a model spread over processes to the same model in one: bits of losses, gradients, kept copies of weights.

    python -m tools.spread_campaign --only qwen3

Kernels are chosen as on CUDA, with a stand-in for varlen attention, and processes are real, over gloo. The first step's
losses must be those of one process under autocast, to the bit; gradients may be 1e-6 apart; no tensor of the shape of
a layer's weight may be kept for the backward pass but the weight itself. Over families, levels of recomputing,
adapters, layers as they are and compiled, ways of sharding, embeddings that are gathered and that rows are looked up
in, and whole gradients between micro-batches.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tests.fixtures.processes import run_ranks
from tests.fixtures.spread import Spread, differences
from tests.model.tiny import VOCAB
from tools.commands import asked, workplace

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "phi", "olmo2", "mistral", "phi3", "mixtral", "qwen3-moe")
LEVELS = ("none", "selective", "full")
ADAPTERS = ("none", "lora", "dora")
BACKENDS = ("", "aot_eager", "inductor")


def cases() -> Iterator[Spread]:
    """Every level, adapter and back end of one family; the others with fewer; every way of sharding."""
    for level, adapter, compiled in product(LEVELS, ADAPTERS, BACKENDS):
        yield Spread("qwen3", level=level, adapter=adapter, compiled=compiled)
    for family, tied in product(FAMILIES, (False, True)):
        yield Spread(family, tied=tied)
    for shard, whole, reshard in product(("full", "none"), (False, True), (False, True)):
        yield Spread("llama", shard=shard, whole=whole, reshard=reshard)
    for whole in (False, True):
        yield Spread("qwen3", shard="hybrid", processes=4, machines=2, whole=whole)
        yield Spread("qwen3", processes=4, whole=whole, level="selective")
    for family in FAMILIES:
        yield Spread(family, vocabulary=VOCAB)
    yield from embeddings()


def embeddings() -> Iterator[Spread]:
    """An embedding that is frozen, trained besides an adapter, or trained in a few rows; on several machines too."""
    for family in ("llama", "gemma3", "gpt2"):
        name = "wte" if family == "gpt2" else "embed_tokens"
        for spread in ({}, {"shard": "hybrid", "processes": 4, "machines": 2}):
            yield Spread(family, frozen=(name,), **spread)
            yield Spread(family, adapter="lora", saved=(name,), **spread)
            yield Spread(family, adapter="lora", new_ids=range(90, VOCAB), **spread)
            yield Spread(family, whole=True, compiled="aot_eager", level="full", **spread)


def main() -> int:
    """Compare them; the exit code is 1 where one differs."""
    options = asked(__doc__, only=("", "cases whose name holds this alone"))
    chosen = [case for case in cases() if options.only in case.name]
    wrong = 0
    for case in chosen:
        with workplace() as work:

            def compare(rank: int, case: Spread = case, place: Path = work) -> None:
                lines = differences(case, rank, place)
                (place / f"found-{rank}").write_text("\n".join(lines))

            codes = run_ranks(case.processes, work, compare, timeout_s=300)
            files = sorted(work.glob("found-*"))
            lines = {line for file in files for line in file.read_text().splitlines()}
        is_wrong = bool(lines or any(codes))
        wrong += is_wrong
        print("WRONG" if is_wrong else "equal", case.name, "; ".join(sorted(lines)), flush=True)
    print(f"{len(chosen)} cases, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
