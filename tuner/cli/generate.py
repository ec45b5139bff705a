"""`tuner generate`: answers of a run, a checkpoint, a Hugging Face directory or a hub model, for people to look at."""

from typing import Literal

from tuner.cli.command import Console, Outcome, command
from tuner.cli.named import model_name


@command("generate")
def generate(  # noqa: PLR0913, PLR0917 - one parameter for each option
    console: Console, model: str, prompt: list[str] | None = None, file: str | None = None,
    compare: Literal["base"] | None = None, base: str | None = None, max_new_tokens: int = 256,
    temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 42, samples: int = 1,
    system: str | None = None, raw: bool = False,
) -> Outcome:
    """Answer prompts with a model, greedily unless a temperature is given."""
    name = model_name(model)
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import generate as work

    prompts = work.prompts_of(prompt or [], file, system, raw)
    sampling = work.Sampling(max_new_tokens, temperature, seed, top_p, top_k)
    return work.answer(name, base, compare is not None, prompts, sampling.times(samples), console)
