"""`tuner export-hf`: a checkpoint as a Hugging Face directory, proven equal to the trained model."""

from pathlib import Path
from typing import Literal

from tuner.cli.command import Console, Outcome, command, input_path
from tuner.cli.named import run_path, stage_path
from tuner.errors import RecipeError


@command("export-hf")
def export_hf(  # noqa: PLR0913, PLR0917 - one parameter for each option
    console: Console, path: str, step: str = "newest", output: str | None = None,
    dtype: Literal["auto", "bf16", "fp32"] = "auto", keep_fp32: str = "", adapter: Literal["merge", "keep"] = "merge",
    base_model: str | None = None, text_only: bool = False, base: Literal["auto", "original", "quantized"] = "auto",
    weights: str = "trained", shard_size: str = "5GB", dry_run: bool = False,
) -> Outcome:
    """Write a Hugging Face directory and verify it before it appears under its name."""
    chosen, shard_bytes = which_step(step), shard_bytes_of(shard_size)
    source = run_path(path, extent="model", which=chosen)
    target = None if output is None else stage_path(output, "all")
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
