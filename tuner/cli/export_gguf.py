"""`tuner export-gguf`: a model as a GGUF file, from which llama.cpp has answered as the trained model does."""

from typing import Annotated, Literal

import typer

from tuner.cli.command import Outcome, VerboseOption, command, console_of, input_path
from tuner.cli.export_hf import shard_bytes_of, which_step
from tuner.cli.named import run_path


@command("export-gguf")
def export_gguf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Run, by its name in ./runs, checkpoint or Hugging Face directory; - reads stdin."
        ),
    ],
    type: Annotated[  # noqa: A002 - the option's name
        Literal[
            "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "iq4_nl",
            "iq4_xs", "q4_1", "q4_0", "mxfp4", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
        ],
        typer.Option(
            case_sensitive=False,
            metavar="TYPE",
            help="f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, mxfp4, or a K-quant from q6_k to q2_k, such as q4_k_m; "
            "what it costs is measured in llama.cpp and shown.",
        ),
    ] = "bf16",
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File to write; default RUN/exports/step-N-TYPE.gguf, or next to DIR."),
    ] = None,
    step: Annotated[str, typer.Option(help="Of a run's checkpoints: newest, best, or a step.")] = "newest",
    weights: Annotated[
        str,
        typer.Option(metavar="WHICH", help="trained, ema (the run's average) or mean:N (of the last N checkpoints)."),
    ] = "trained",
    adapter: Annotated[
        Literal["merge", "keep"],
        typer.Option(help="Merge an adapter into the weights, or write it by itself, for llama.cpp to add."),
    ] = "merge",
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Largest file, e.g. 40GB: more are written to a directory. Default: one."),
    ] = None,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Write a Modelfile for Ollama next to the file.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not ask llama.cpp; the file's metadata say so.")
    ] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Write a GGUF file and have llama.cpp answer as the trained model does before it appears."""
    chosen = which_step(step)
    source = run_path(path, others=True, extent="model", which=chosen)
    shard_bytes = None if shard_size is None else shard_bytes_of(shard_size)
    target = None if output is None else input_path(output)
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import export_gguf as work

    form = work.GgufForm(type, target, shard_bytes, modelfile, not no_verify)
    return work.export(source, chosen, weights, adapter == "keep", form, console)
