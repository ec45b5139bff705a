"""`tuner export-gguf`: a model as a GGUF file, from which llama.cpp has answered as the trained model does."""

from typing import Literal

from tuner.cli.command import Console, Outcome, command, input_path
from tuner.cli.export_hf import shard_bytes_of, which_step
from tuner.cli.named import run_path

Type = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs",
    "q4_1", "q4_0", "mxfp4", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]


@command("export-gguf")
def export_gguf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    console: Console, path: str, type: Type = "bf16", output: str | None = None,  # noqa: A002 - the option's name
    step: str = "newest", weights: str = "trained", adapter: Literal["merge", "keep"] = "merge",
    shard_size: str | None = None, modelfile: bool = False, no_verify: bool = False,
) -> Outcome:
    """Write a GGUF file and have llama.cpp answer as the trained model does before it appears."""
    chosen = which_step(step)
    source = run_path(path, others=True, extent="model", which=chosen)
    shard_bytes = None if shard_size is None else shard_bytes_of(shard_size)
    target = None if output is None else input_path(output)
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import export_gguf as work

    found = work.source_of(source, console.warn, chosen, work.Weights.parse(weights), adapter == "keep")
    return work.export(found, console, type, target, shard_bytes, modelfile, not no_verify)
