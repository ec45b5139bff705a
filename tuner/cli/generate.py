"""`tuner generate`: answers of a run, a checkpoint, a Hugging Face directory or a hub model, for people to look at."""

from typing import Annotated, Literal

import typer

from tuner.cli.command import Outcome, VerboseOption, command, console_of
from tuner.cli.named import ModelArgument, model_name

BaseOption = Annotated[str | None, typer.Option(help="The base model, where the directory does not say.")]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")]
SeedOption = Annotated[int, typer.Option(help="Seed of drawn tokens.")]
SystemOption = Annotated[str | None, typer.Option(help="System message before each prompt.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, help="0 takes the most likely token; above, tokens are drawn.")
]
TopPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Draw from the fewest tokens whose probabilities add up to this much.")
]
TopKOption = Annotated[int, typer.Option(min=0, help="Draw from so many of the most likely tokens; 0: from all.")]


@command("generate")
def generate(  # noqa: PLR0913, PLR0917 - one parameter for each option
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to answer; may be given several times.")] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts from a file: .txt, one a line, or .jsonl with prompt or messages."),
    ] = None,
    compare: Annotated[
        Literal["base"] | None, typer.Option(help="Show the base model's answer next to the trained one's.")
    ] = None,
    base: BaseOption = None,
    max_new_tokens: NewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 42,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt, with the seed and the next ones.")] = 1,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Answer prompts with a model, greedily unless a temperature is given."""
    name = model_name(model)
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import generate as work

    prompts = work.prompts_of(prompt or [], file, system, raw)
    sampling = work.Sampling(max_new_tokens, temperature, seed, top_p, top_k)
    return work.answer(name, base, compare is not None, prompts, sampling.times(samples), console)
