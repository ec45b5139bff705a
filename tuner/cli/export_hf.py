"""`tuner export-hf`: a checkpoint as a Hugging Face directory, proven equal to the trained model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tuner.cli.command import Outcome, VerboseOption, command, console_of, input_path
from tuner.cli.named import RunOrCheckpointArgument, run_path, stage_path
from tuner.errors import RecipeError


@command("export-hf")
def export_hf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    path: RunOrCheckpointArgument,
    step: Annotated[str, typer.Option(help="Of a run's checkpoints: newest, best, or a step.")] = "newest",
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory to write; default RUN/exports/step-N, a kept adapter's step-N-adapter, the average's -ema.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(help="Type of the weights; auto: bf16 where rounding keeps 4/5 of what training changed."),
    ] = "auto",
    keep_fp32: Annotated[
        str, typer.Option(metavar="NAMES", help="Weights written in fp32 whatever --dtype is, e.g. lm_head,router.")
    ] = "",
    adapter: Annotated[
        Literal["merge", "keep"],
        typer.Option(help="Merge an adapter into the weights, or keep it as peft's directory."),
    ] = "merge",
    base_model: Annotated[
        str | None, typer.Option(help="Base model that a kept adapter names; default what the run was trained from.")
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Of a multimodal checkpoint the language model alone.")
    ] = False,
    base: Annotated[
        Literal["auto", "original", "quantized"],
        typer.Option(help="Merge an adapter of a quantised base into which; auto: what is closer to training, by KL."),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(metavar="WHICH", help="trained, ema (the run's average) or mean:N (of the last N checkpoints)."),
    ] = "trained",
    shard_size: Annotated[str, typer.Option(help="Largest weights file, e.g. 5GB or 4GiB.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written and write nothing.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Write a Hugging Face directory and verify it before it appears under its name."""
    chosen, shard_bytes = which_step(step), shard_bytes_of(shard_size)
    source = run_path(path, extent="model", which=chosen)
    target = None if output is None else stage_path(output, "all")
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import export_hf as work

    average = work.Weights.parse(weights)
    kept = tuple(filter(None, keep_fp32.split(",")))
    options = work.ExportOptions(dtype, adapter, shard_bytes, _named(base_model), text_only, base, average, kept)
    return work.export(source, target, chosen, options, dry_run, console)


def which_step(text: str) -> int | Literal["newest", "best"]:
    """What `--step` means. Raises RecipeError."""
    if text in ("newest", "best"):
        return "best" if text == "best" else "newest"
    if not text.isascii() or not text.isdigit():
        raise RecipeError(f"--step {text}: no such checkpoint", hint="write newest, best or a step, such as 500")
    return int(text)


def shard_bytes_of(text: str) -> int:
    """What `--shard-size` means. Raises RecipeError."""
    from tuner.config.numbers import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"--shard-size {text}: {error}", hint="write 5GB, 500MB or 4GiB") from None


def _named(base_model: str | None) -> str | None:
    """A base model as an adapter names it: a directory by its absolute path, so that it is found from anywhere."""
    if base_model is None or not Path(base_model).expanduser().is_dir():
        return base_model
    return str(input_path(base_model))
