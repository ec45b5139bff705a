"""What `tuner init` does: look at the rows, write a commented recipe."""

from pathlib import Path

from tuner.cli.command import Outcome, say
from tuner.config.load import load_recipe
from tuner.config.shipped import Example, write_rows
from tuner.config.starter import Room, bad_rows, counted, not_used, starter
from tuner.data.look import look
from tuner.errors import RecipeError
from tuner.runtime.activity import LABEL_WIDTH
from tuner.runtime.console import Console
from tuner.runtime.memory import host_memory

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists its devices: without it torch, which takes seconds, is not asked for any."""


def first_recipe(model: str | None, data: str | None, example: str | None) -> Outcome:
    """The commented recipe for a model and rows, or for rows that ship."""
    model, data = _chosen(model, data, example)
    given = load_recipe({"model": {"name_or_path": model}, "data": {"train": data}}).recipe
    with Console(main=True).doing(f"reading {data}") as doing:  # a GB takes some seconds
        seen = look(given.model.name_or_path, given.data.train[0], lambda far: doing.update(f"reading {data}: {far}"))
    text = starter(model, data, seen, _room())
    tokens = "tokens" if seen.by_tokenizer else "tokens (estimated)"
    say(
        f"read      {data}: {counted(seen)}, {seen.form}{not_used(seen)}; longest {seen.longest:,} "
        f"{tokens} -> data.max_length {seen.max_length}, {seen.steps:,} step{'' if seen.steps == 1 else 's'}",
        LABEL_WIDTH,
    )
    warnings = [f"{bad_rows(seen)}; the first: {seen.first_bad}"] if seen.bad else []
    metrics = {
        "rows": seen.rows, "longest_tokens": seen.longest, "max_length": seen.max_length,
        "packed_rows": seen.packed_rows, "steps": seen.steps, "bad_rows": seen.bad,
    }  # fmt: skip
    return Outcome(text, metrics=metrics, warnings=warnings, is_text=True)


def _chosen(model: str | None, data: str | None, example: str | None) -> tuple[str, str]:
    """The model and the rows, those of an example written here. Raises RecipeError."""
    if (data is None) == (example is None):
        given = "got both --data and --example" if data is not None else "got no rows"
        raise RecipeError(given, hint="name yours: --data rows.jsonl; or take some that ship: --example orders")
    if example is None:
        if model is None or data is None:
            raise RecipeError("got no model", hint="name one: --model HuggingFaceTB/SmolLM2-135M-Instruct")
        return model, data
    task = Example.named(example)
    path = write_rows(example, Path.cwd())
    say(f"wrote     {path}: {task.what}", LABEL_WIDTH)
    return model or task.model, path.name


def _room() -> Room:
    """The memory of the first GPU; without any, the machine's."""
    if NVIDIA.is_dir():
        import torch

        if torch.cuda.is_available():
            return Room("the GPU", torch.cuda.mem_get_info()[1])
    return Room("this machine", host_memory()[0])
