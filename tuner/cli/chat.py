"""`tuner chat`: talk to a run, a checkpoint, a Hugging Face directory or a hub model."""

from __future__ import annotations

import os

from tuner.cli.command import DebugOption, JsonOption, Outcome, OutputOptions, VerboseOption, run_command
from tuner.cli.generate import (
    BaseOption,
    NewTokensOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from tuner.cli.named import ModelArgument, model_name
from tuner.cli.talk import talk


def chat(
    model: ModelArgument,
    system: SystemOption = None,
    max_new_tokens: NewTokensOption = 1024,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 42,
    base: BaseOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Talk to a model, which is loaded once and remembers what was said; on a pipe, answer one prompt per line."""
    stdout = os.dup(1)

    def body() -> Outcome:
        from tuner.runtime.console import Console

        name = model_name(model)
        console = Console(level="debug" if verbose else "info")
        with console.doing("loading torch", at_once=True):
            from tuner.generate import Sampling, load_generator

        sampling = Sampling(max_new_tokens, temperature, seed, top_p, top_k)
        sampling.check()
        with console.doing(f"loading {name}"):
            generator = load_generator(name, base=base, warn=console.warn)
        return talk(generator, sampling, system, None if json else stdout)

    run_command("chat", OutputOptions(json, verbose, debug), body)
